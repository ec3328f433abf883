"""Request bodies of the control routes, with their validation, and the status of a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, SecretStr, field_validator

from sf_core.config.rollout_config import MAX_TOGETHER, Cause, RolloutConfig
from sf_core.waits import Facts
from storage.tables.judgements import Judgement

MAX_OUTPUT = 70_000
"""Maximum length of captured agent output (command agents keep less: agents/command_output.py)."""

MAX_METADATA_BYTES = 2**16
"""Most bytes of a session's metadata as JSON; they are weighed and shown with every turn."""

MAX_PARTS = 1024
MAX_STEPS = 2**14
"""Most named parts of a reward, and most rewards of single answers: each is looked up."""

MAX_SPENT_S = 1e9
"""Most seconds that a runner says to have spent: those of many cores for years."""

MAX_INDEX = 2**31 - 1
"""Largest number of a batch, an evaluation or a policy version."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class RunRollout(RolloutConfig):
    """The settings `rollout` of a run. Unlike in RunConfig, a group may have a single session."""

    group_size: int = Field(8, ge=1, le=MAX_TOGETHER)


class RunSpec(Body):
    """A run, as an attempt of its flow registers it. Fields without a description mean the same as in
    RunConfig."""

    run_id: RunName
    run_dir: str
    model_dir: str
    """Folder with the tokenizer and the chat template."""
    served_model: str = "policy"
    tasks: str = "tasks"
    """Name, in messages, of the function that makes the run's tasks."""
    seed: int
    rollout: RunRollout = RunRollout()
    lag_bound: int = Field(ge=0)
    context_length: int = Field(ge=2)
    judges_groups: bool = False
    """True if one runner scores the answers of a training group together."""
    judge_budgets: dict[str, int] = {}
    """Maximum number of tokens that each judge may use between two batches, by the judge's name. Judges
    without an entry have no limit."""
    scored_apart: bool = False
    """True if only runners that claim answers score them, because the runners of agents cannot reach all
    judges."""
    follows_grammars: bool = False
    """True if the engines of the run can hold answers to JSON Schemas."""
    max_waiting: int = Field(20_000, ge=1)
    """Maximum number of requests that wait for an engine. Further requests are refused (429)."""
    engine_silence_s: float = Field(600.0, gt=0)
    """Timeout, in seconds, after which an engine that has work but sends nothing is dropped. Must exceed the
    time of any prefill and of any loading of weights. WebSocket pings detect a dead process or network within
    40 s."""
    was_warmed: bool = False
    """True if the run began with a warm start. A tool call that cannot be parsed then counts as the policy's
    fault."""
    num_batches: int = Field(ge=0, le=MAX_INDEX)
    """Number of iterations of the whole run. 0: evaluation only."""
    iteration: int = Field(ge=0, le=MAX_INDEX)
    """Index of the next batch."""
    version: int = Field(ge=0, le=MAX_INDEX)
    weights_uri: str
    done_groups: list[int]
    """Numbers of the groups that earlier batches consumed or rejected."""
    attempt: int = Field(ge=0)
    """Number of this attempt of the flow. A later attempt supersedes earlier ones."""
    origin: str = ""
    """Name of version 0. If a run is registered with another name, the run starts over and its earlier
    results do not count."""
    first_attempt: int = Field(0, ge=0)
    """Number of the first attempt at each session. Sessions with a lower number are older than the last start
    of the run. The data plane chooses this number."""
    key: SecretStr | None = Field(None, min_length=8)
    """Key with which clients open sessions and groups of this run, and take turns outside of sessions. None:
    where the data plane has the account's key, clients on loopback need none."""

    @field_validator("key")
    @classmethod
    def _holds_no_colon(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and ":" in key.get_secret_value():
            raise ValueError("a key must not contain a colon, because the text after a colon names a session")
        return key

    @property
    def clients_key(self) -> str | None:
        """`key` in plain text."""
        return None if self.key is None else self.key.get_secret_value()


class TaskName(Body):
    task_id: str = ""
    """Id of the task."""
    environment: str = ""
    """Name of the task's environment."""


class Spent(Body):
    cpu_s: float = Field(0.0, ge=0, le=MAX_SPENT_S)
    """CPU seconds of the runner's process, and of ended programs that the process started."""
    busy_s: float = Field(0.0, ge=0, le=MAX_SPENT_S)
    """Seconds in which the runner's event loop computed or waited for a core."""
    num_ended: int = Field(0, ge=0, le=MAX_INDEX)
    """Number of sessions and scored answers that have ended."""

    def since(self, earlier: Spent) -> Spent:
        """What was spent after `earlier`; all of it if `earlier` is more, because a runner began anew."""
        spent = {name: value - getattr(earlier, name) for name, value in self}
        return self if min(spent.values()) < 0 else Spent(**spent)

    def __add__(self, other: Spent) -> Spent:
        # the bounds are those of one report
        return Spent.model_construct(**{name: value + getattr(other, name) for name, value in self})


class ClaimBody(Body):
    runner: str = Field(min_length=1)
    """Id of the runner."""
    max: int = Field(ge=0, le=MAX_TOGETHER)
    """Maximum number of sessions to claim."""
    wait_s: float = Field(0.0, ge=0)
    """Longest time to wait for the first session, in seconds."""
    work: Work = "agent"
    """Work that the runner claims. agent: sessions to run an agent on. reward: answers to score."""
    attempt: int | None = None
    """Attempt of the flow that started the runner. Runners of earlier attempts are released. None: the
    current attempt at the runner's first claim."""
    tasks: dict[str, TaskName] = {}
    """Tasks, by session id, of the sessions whose agents have started since the runner's last claim."""
    answered: list[str] = []
    """Ids of the sessions whose agents have ended since the runner's last claim. The runner limits the time
    of their scoring."""
    running: list[str] | None = None
    """Ids of all sessions that the runner works on. Other sessions of this runner are given out again. None:
    this claim does not list them, because a list of thousands is slow."""
    spent: Spent = Spent()
    """Effort of the runner since it began. A claim that is sent again therefore counts once."""


class ReleaseBody(Body):
    attempt: int | None = None
    """Attempt of the flow that ends. None: the current attempt."""


def _check_metadata(given: dict[str, Any]) -> dict[str, Any]:
    if (size := len(msgspec.json.encode(given))) > MAX_METADATA_BYTES:
        raise ValueError(f"must have at most {MAX_METADATA_BYTES} bytes as JSON, got {size}")
    return given


Metadata = Annotated[dict[str, Any], AfterValidator(_check_metadata)]


class SessionBody(Body):
    """A session for an external agent. Runners do not get this session."""

    run_id: RunName
    policy: str | None = None
    """Model name that the agent will send. None: the model name of the run."""
    group: str | None = Field(None, min_length=1)
    """Name that is stored with the session. Rewards of sessions with the same name can be compared."""
    task_id: str = ""
    """Id of the task, stored with the session."""
    environment: str = ""
    """Name of the task's environment, stored with the session."""
    metadata: Metadata = {}
    """Values of your own, stored with the session: at most 64 KiB as JSON."""


class GroupBody(Body):
    """A group for external agents: sessions of one task, whose rewards are compared."""

    split: Literal["train", "holdout"] = "train"
    """train: sessions of a batch. holdout: sessions of an evaluation that is in progress."""
    size: int | None = Field(None, ge=1, le=MAX_TOGETHER)
    """Number of sessions. None: `rollout.group_size`. A held-out group may have fewer sessions."""
    name: str | None = Field(None, min_length=1)
    """Name of the group. If a group of this name exists, its open sessions are returned instead of new
    ones."""
    task_id: str = ""
    """Id of the task, stored with the session."""
    environment: str = ""
    """Name of the task's environment, stored with the session."""
    metadata: Metadata = {}
    """Values of your own, stored with the session: at most 64 KiB as JSON."""


class RewardBody(Body):
    reward: FiniteFloat
    """Reward of the session."""
    reward_parts: dict[str, FiniteFloat] = {}
    """Named parts of the reward."""
    step_rewards: dict[str, FiniteFloat] = {}
    """Rewards of single answers, by answer id."""


def _read_judgements(given: list[Any]) -> list[Judgement]:
    return msgspec.convert(given, list[Judgement])


class FinishBody(Body):
    status: Literal["finished", "failed", "answered", "unjudged"]
    """finished: the session has ended with a reward. failed: the session has failed. answered: the agent has
    ended and the reward follows, from a runner that scores or, for an external agent, in another
    report. unjudged: a judge was not available, so the answer is scored again. If several answers are scored
    together, unjudged is reported with each of them and counts once."""
    answer: str | None = None
    """The agent's answer, as JSON."""
    reward: FiniteFloat | None = None
    """Reward of the session. Required with status finished, unless the session was given a reward before."""
    reward_parts: dict[str, FiniteFloat | None] = {}
    """Named parts of the reward."""
    step_rewards: dict[str, FiniteFloat | None] = {}
    """Rewards of single answers, by answer id."""
    output: str | None = Field(None, max_length=MAX_OUTPUT)
    """Output of the agent's process. It is stored with the session."""
    error: str | None = None
    """Message of the failure."""
    cause: Cause = "agent"
    """Cause of a failure."""
    judgements: Annotated[list[Any], AfterValidator(_read_judgements)] = []
    """Questions to judges and their replies, and noted values, in the columns of the table `judgements`."""
    scoring: str = ""
    """Field `scoring` of the claim that gave out an unjudged answer. Empty: no claim gave it out."""
    task_id: str = ""
    """Id of the task, stored with the session."""
    environment: str = ""
    """Name of the task's environment, stored with the session."""

    @property
    def has_reward(self) -> bool:
        """Whether there is a reward and all of it is finite: infinity and NaN arrive as null in JSON."""
        numbers = (self.reward, *self.reward_parts.values(), *self.step_rewards.values())
        return None not in numbers

    def or_earlier(self, earlier: RewardBody | None) -> FinishBody:
        """This report, with the reward that the session was given before if the report has none."""
        if self.reward is not None or earlier is None:
            return self
        merged = {
            "reward": earlier.reward,
            "reward_parts": {**earlier.reward_parts, **self.reward_parts},
            "step_rewards": {**earlier.step_rewards, **self.step_rewards},
        }
        return self.model_copy(update=merged)

    @property
    def parting(self) -> str:
        """Message for agents that still wait for a turn of the session."""
        return "the session ran too long" if self.cause == "time" else "the session is over"

    def of_failure(self, error: str, cause: Cause, reward: float) -> FinishBody:
        """This report changed to that of a failure that counts with this reward."""
        nothing: dict[str, Any] = {"reward_parts": {}, "step_rewards": {}}
        failure = {"status": "failed", "error": error, "cause": cause, "reward": reward, **nothing}
        return self.model_copy(update=failure)


class FinishedReport(FinishBody):
    session_id: str
    """Id of the session."""


class FinishedBody(Body):
    """Reports of several sessions. Sessions that have already ended are skipped. A report that is refused
    does not affect the other reports. If the request fails and may be retried, send the whole body again."""

    sessions: list[FinishedReport]
    """One report per session."""


class SealBody(Body):
    attempt: int
    """Attempt of the flow that writes the files."""


class WeightsBody(Body):
    version: int = Field(ge=0, le=MAX_INDEX)
    """Number of the policy version."""
    uri: str
    """Location of the weights."""


class RevokeBody(Body):
    within_s: float | None = Field(None, gt=0)
    """Time, in seconds, within which the engine must yield; then it is dropped."""


class PauseBody(Body):
    mode: PauseMode = "freeze"
    """freeze: engines keep their requests and stop sampling. evacuate: engines return their requests."""
    engine: str | None = None
    """Id of the engine. None: all engines of the run."""


class ResumeBody(Body):
    engine: str | None = None
    """Id of the engine. None: all engines of the run."""


class EvaluationBody(Body):
    num_tasks: int = Field(ge=1, le=MAX_TOGETHER)
    """Number of held-out tasks."""


class StageBody(BaseModel):
    model_config = ConfigDict(extra="allow")
    iteration: int
    stage: str


class EnginePace(TypedDict):
    worker: str
    version: int | None
    """Policy version that it samples with; None while it loads the first."""
    tokens: int
    """Tokens that it has sampled in `seconds` of serving."""
    seconds: float


class EngineStatus(EnginePace):
    id: str
    state: str
    running: int


class RunnerStatus(TypedDict):
    work: Work
    cpu_s: float
    """CPU seconds that the runner has used since it began."""
    num_ended: int
    """Number of its sessions and scored answers that have ended."""


class Straggler(TypedDict):
    session: str
    group: int | None
    """None: a held-out session."""
    age_s: float


class RunStatus(TypedDict):
    run_id: str
    run_dir: str
    attempt: int
    iteration: NotRequired[int]
    stage: NotRequired[str]
    wait: NotRequired[Facts]
    """These three, and others, are there once the flow has reported them."""
    version: int
    next_batch: int
    groups_accepted: int
    groups_needed: int
    groups_in_flight: int
    tokens_left: float | None
    """Estimated tokens still to be sampled (num_sessions_left); None before a session has finished."""
    waiting_for: str
    sessions_running: int
    straggler: Straggler | None
    work: dict[str, int]
    """Sessions for runners, by kind of work: those claimed, and those that wait for a runner."""
    runners: dict[str, RunnerStatus]
    requests_waiting: int
    paused: bool
    released: bool
    engines: list[EngineStatus]
    tokens_total: int
    tokens_per_second: float
    reward_recent: float | None
    evaluations: dict[str, dict[str, int]]
    counters: dict[str, int]
    last_error: str


PauseMode = Literal["freeze", "evacuate"]

Work = Literal["agent", "reward"]
