"""Request bodies of the control routes and the first frame of engines, with their validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, SecretStr, field_validator

from sf_core.config.failures import Cause, FailureRules
from sf_core.config.run_config import GateName

MAX_INDEX = 2**31 - 1
"""Largest number of a batch, an evaluation or a policy version."""

MAX_TOGETHER = 2**16
"""Most sessions of a group or claim, groups of a batch, and tasks of an evaluation: each is an object."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class RunSpec(Body):
    """A run as one attempt of its flow registers it. Fields are those of RunConfig unless said otherwise."""

    run_id: RunName
    run_dir: str
    model_dir: str
    """Folder with tokenizer and chat template."""
    served_model: str = "policy"
    seed: int
    group_size: int = Field(ge=1, le=MAX_TOGETHER)
    groups_per_batch: int = Field(ge=1, le=MAX_TOGETHER)
    gate: GateName = "all"
    lag_bound: int = Field(ge=0)
    on_max_lag: Literal["wait", "drop"] = "wait"
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(ge=1)
    context_length: int = Field(ge=2)
    session_attempts: int = Field(3, ge=1)
    session_timeout_s: float = Field(gt=0)
    on_failure: FailureRules = FailureRules()
    failed_reward: FiniteFloat = 0.0
    request_patience_s: float = Field(600.0, gt=0)
    """A request that no engine takes for this long is refused (503). Sessions have a timeout of their own."""
    max_waiting: int = Field(20_000, ge=1)
    """Requests that may wait for an engine; further ones are refused (429)."""
    engine_silence_s: float = Field(600.0, gt=0)
    """An engine that has work and sends nothing for this long is dropped: must be longer than any prefill and
    any loading of weights. A dead process or network is noticed within 40 s by WebSocket pings."""
    ignored_fields: tuple[str, ...] = ()
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
    key: SecretStr | None = Field(None, min_length=8)
    """Key of this run's agent routes, beside the data plane's own; required even if that has none."""

    @field_validator("key")
    @classmethod
    def _holds_no_colon(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and ":" in key.get_secret_value():
            raise ValueError("a key must not contain a colon: what follows one names a session")
        return key

    @property
    def agents_key(self) -> str | None:
        """`key` in plain text."""
        return None if self.key is None else self.key.get_secret_value()


class TaskName(Body):
    task_id: str
    environment: str


class ClaimBody(Body):
    runner: str
    max: int = Field(ge=0, le=MAX_TOGETHER)
    wait_s: float = Field(0.0, ge=0)
    work: Work = "agent"
    """What the runner claims: sessions to run an agent on, or answers to score."""
    attempt: int | None = None
    """Attempt of the flow that started the runner; runners of earlier attempts are released. None: the
    attempt that is current at the runner's first claim."""
    tasks: dict[str, TaskName] = {}
    """Tasks by session id, of the sessions that have begun since the runner last sent this."""
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


class RewardBody(Body):
    reward: FiniteFloat
    reward_parts: dict[str, FiniteFloat] = {}


class FinishBody(Body):
    status: Literal["finished", "failed", "answered"]
    """answered: the agent is done, and another runner scores its answer."""
    answer: str | None = None
    """The agent's answer, as JSON."""
    reward: FiniteFloat | None = None
    reward_parts: dict[str, FiniteFloat | None] = {}
    error: str | None = None
    cause: Cause = "agent"
    """Cause of a failure."""
    task_id: str = ""
    environment: str = ""

    @property
    def has_reward(self) -> bool:
        """Whether there is a reward and all its parts are finite: infinity and NaN arrive as null in JSON."""
        return self.reward is not None and None not in self.reward_parts.values()

    def or_earlier(self, reward: float | None, reward_parts: Mapping[str, float]) -> FinishBody:
        """This report, with the reward that the session was given before if the report has none."""
        if self.reward is not None or reward is None:
            return self
        parts = {**reward_parts, **self.reward_parts}
        return self.model_copy(update={"reward": reward, "reward_parts": parts})

    @property
    def parting(self) -> str:
        """Message for agents that still wait for a turn of the session."""
        return "the session ran too long" if self.cause == "time" else "the session is over"

    def of_failure(self, error: str, cause: Cause, reward: float) -> FinishBody:
        """This report changed to that of a failure that counts with this reward."""
        failure = {"status": "failed", "error": error, "cause": cause, "reward": reward, "reward_parts": {}}
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


class HelloBody(Body):
    """First frame of an engine."""

    run_id: str
    attempt: int
    lease_id: str
    epoch: int = Field(ge=0)
    """Number of this start of the lease; the highest is the latest start, whichever says hello first."""
    engine_id: str
    worker: str
    max_running: int = Field(ge=1)


PauseMode = Literal["freeze", "evacuate"]


Work = Literal["agent", "reward"]
