"""Request bodies of the control routes, with their validation, and the status of a run."""

from __future__ import annotations

from operator import not_
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, SecretStr, field_validator

from sf_core.config.failures import Cause
from sf_core.config.rollout_config import MAX_TOGETHER, RolloutConfig
from sf_core.waits import Facts
from storage.tables.judgements import Judgement

MAX_OUTPUT = 70_000
"""Maximum length of captured agent output (command agents keep less: agents/command_output.py)."""

MAX_INDEX = 2**31 - 1
"""Largest number of a batch, an evaluation or a policy version."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class RunRollout(RolloutConfig):
    """The settings `rollout` of a run, whose trainer may be one that compares no rewards within a group."""

    group_size: int = Field(8, ge=1, le=MAX_TOGETHER)


class RunSpec(Body):
    """A run as one attempt of its flow registers it. Fields are those of RunConfig unless said otherwise."""

    run_id: RunName
    run_dir: str
    model_dir: str
    """Folder with tokenizer and chat template."""
    served_model: str = "policy"
    tasks: str = "tasks"
    """The function that makes its tasks, in the words of messages."""
    seed: int
    rollout: RunRollout = RunRollout()
    lag_bound: int = Field(ge=0)
    context_length: int = Field(ge=2)
    judges_groups: bool = False
    """The answers of a training group are scored together, by one runner."""
    # of a run without judges the journal is as it was before there were any
    judge_budgets: dict[str, int] = Field({}, exclude_if=not_)
    """Most tokens that judges may take from one batch to the next, by their names. Those without are not
    bounded."""
    scored_apart: bool = Field(False, exclude_if=not_)
    """Only runners that claim answers score: agents' runners cannot ask all of its judges."""
    follows_grammars: bool = False
    """Its engines hold answers to JSON Schemas."""
    max_waiting: int = Field(20_000, ge=1)
    """Requests that may wait for an engine; further ones are refused (429)."""
    engine_silence_s: float = Field(600.0, gt=0)
    """An engine that has work and sends nothing for this long is dropped: must be longer than any prefill and
    any loading of weights. A dead process or network is noticed within 40 s by WebSocket pings."""
    was_warmed: bool = False
    """The run began with a warm start, after which a call that cannot be parsed is the policy's fault."""
    num_batches: int = Field(ge=0, le=MAX_INDEX)
    """Iterations of the whole run; 0 for evaluation only."""
    iteration: int = Field(ge=0, le=MAX_INDEX)
    """Index of the next batch."""
    version: int = Field(ge=0, le=MAX_INDEX)
    weights_uri: str
    done_groups: list[int]
    """Group indices consumed or rejected by earlier batches."""
    attempt: int = Field(ge=0)
    """Number of this attempt of the flow; a later attempt fences off the earlier ones."""
    origin: str = ""
    """Names version 0. A run registered with another one begins anew: what it did before does not count."""
    first_attempt: int = Field(0, ge=0)
    """Number of the first attempt at each session. Those with lower ones began before the run began anew. The
    data plane chooses it."""
    key: SecretStr | None = Field(None, min_length=8)
    """Key of this run's agent routes, beside the data plane's own; required even if that has none."""

    @field_validator("key")
    @classmethod
    def _holds_no_colon(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and ":" in key.get_secret_value():
            raise ValueError("a key must not contain a colon, because the text after a colon names a session")
        return key

    @property
    def agents_key(self) -> str | None:
        """`key` in plain text."""
        return None if self.key is None else self.key.get_secret_value()


class TaskName(Body):
    task_id: str = ""
    environment: str = ""


class ClaimBody(Body):
    runner: str = Field(min_length=1)
    max: int = Field(ge=0, le=MAX_TOGETHER)
    wait_s: float = Field(0.0, ge=0)
    work: Work = "agent"
    """What the runner claims: sessions to run an agent on, or answers to score."""
    attempt: int | None = None
    """Attempt of the flow that started the runner; runners of earlier attempts are released. None: the
    attempt that is current at the runner's first claim."""
    tasks: dict[str, TaskName] = {}
    """Tasks by session id, of the sessions whose agents have begun since the runner last sent this."""
    answered: list[str] = []
    """Ids of the sessions whose agents have ended since then; the runner bounds the time of the scoring."""
    running: list[str] | None = None
    """Ids of all sessions the runner works on; others that it was given are given out again. None: not listed
    in this claim, because listing thousands is slow."""


class ReleaseBody(Body):
    attempt: int | None = None
    """Attempt of the flow that ends. None: the current one."""


class SessionBody(Body):
    """A session to open for an external agent, which no runner was given."""

    run_id: RunName
    policy: str | None = None
    """Model name that the agent will send. None: the run's."""
    group: str | None = Field(None, min_length=1)
    """Stored with the session, to compare the rewards of sessions with the same group."""
    task_id: str = ""
    environment: str = ""
    metadata: dict[str, Any] = {}


class GroupBody(Body):
    """A group that agents outside work on: sessions of one task, whose rewards are compared."""

    split: Literal["train", "holdout"] = "train"
    """holdout: sessions of the evaluations that are under way."""
    size: int | None = Field(None, ge=1, le=MAX_TOGETHER)
    """Number of sessions. None: `rollout.group_size`. Of held-out ones there may be fewer."""
    name: str | None = Field(None, min_length=1)
    """Declared again under the same name, its open sessions are answered and no new ones."""
    task_id: str = ""
    environment: str = ""
    metadata: dict[str, Any] = {}


class RewardBody(Body):
    reward: FiniteFloat
    reward_parts: dict[str, FiniteFloat] = {}
    step_rewards: dict[str, FiniteFloat] = {}
    """What single answers earned, by their ids."""


def _read_judgements(given: list[Any]) -> list[Judgement]:
    return msgspec.convert(given, list[Judgement])


class FinishBody(Body):
    status: Literal["finished", "failed", "answered", "unjudged"]
    """answered: the agent is done, and its reward follows: another runner scores the answer, or, where the
    agent came by itself, another report has it. unjudged: a runner could not have the answer judged, which is
    scored again. Of answers that are scored together it is reported with each, and counts once."""
    answer: str | None = None
    """The agent's answer, as JSON."""
    reward: FiniteFloat | None = None
    reward_parts: dict[str, FiniteFloat | None] = {}
    step_rewards: dict[str, FiniteFloat | None] = {}
    """What single answers earned, by their ids."""
    output: str | None = Field(None, max_length=MAX_OUTPUT)
    """What the agent's process wrote, kept with the session."""
    error: str | None = None
    cause: Cause = "agent"
    """Cause of a failure."""
    judgements: Annotated[list[Any], AfterValidator(_read_judgements)] = []
    """What judges were asked for the reward, and what was noted, in the columns of the table `judgements`."""
    scoring: str = ""
    """The field `scoring` of the claim that gave out an unjudged answer; empty if no claim did."""
    task_id: str = ""
    environment: str = ""

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


class FinishedBody(Body):
    """Reports of several sessions; sessions that are already over are skipped. A report that is refused for
    good does not affect the others; if one may be retried, the whole body may."""

    sessions: list[FinishedReport]


class SealBody(Body):
    attempt: int


class WeightsBody(Body):
    version: int = Field(ge=0, le=MAX_INDEX)
    uri: str


class RevokeBody(Body):
    within_s: float | None = Field(None, gt=0)
    """An engine that has not yielded by then is dropped."""


class PauseBody(Body):
    mode: PauseMode = "freeze"
    engine: str | None = None
    """Engine id. None: the whole run."""


class ResumeBody(Body):
    engine: str | None = None


class EvaluationBody(Body):
    num_tasks: int = Field(ge=1, le=MAX_TOGETHER)


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
    retiring: bool


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
