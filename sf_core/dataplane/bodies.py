"""Bodies of the control routes: what flows and agent runners may ask, checked at the border."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, SecretStr, ValidationError, field_validator

from sf_core.config.failures import Cause, FailureRules
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.request import parse_json
from sf_core.dataplane.routing.router import PauseMode
from sf_core.dataplane.routing.wait_queue import Limits
from sf_core.dataplane.runs.rollout_manager import BatchRules
from sf_core.dataplane.runs.runners import Work

MAX_INDEX = 2**31 - 1
"""Of batches, evaluations and versions."""

MAX_TOGETHER = 2**16
"""Sessions of a group, groups of a batch, tasks of an evaluation: for each there is an object."""


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
    gate: Literal["all", "varied"] = "all"
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
    """A request that no engine takes for this long is refused (503). Sessions have their own clock too."""
    max_waiting: int = Field(20_000, ge=1)
    """Requests that may wait for an engine; further ones are refused (429)."""
    engine_silence_s: float = Field(600.0, gt=0)
    """An engine that has work and says nothing for this long is dropped: longer than any prefill and any
    loading of weights. A dead process or network is noticed within 40 s by other means."""
    ignored_fields: tuple[str, ...] = ()
    num_batches: int = Field(ge=0, le=MAX_INDEX)
    """Iterations of the whole run; 0 for evaluation only."""
    iteration: int = Field(ge=0, le=MAX_INDEX)
    """The next batch."""
    version: int = Field(ge=0, le=MAX_INDEX)
    weights_uri: str
    done_groups: list[int]
    """Group indices consumed or rejected by earlier batches."""
    attempt: int = Field(ge=0)
    """Counts the flow's attempts; a later one fences the earlier ones off."""
    key: SecretStr | None = Field(None, min_length=8)
    """Opens the agents' routes of this run beside the data plane's own key; asked for even without that."""

    @field_validator("key")
    @classmethod
    def _holds_no_colon(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and ":" in key.get_secret_value():
            raise ValueError("a key must not contain a colon: what follows one names a session")
        return key

    @property
    def agents_key(self) -> str | None:
        """The key in plain text."""
        return None if self.key is None else self.key.get_secret_value()

    @property
    def rules(self) -> BatchRules:
        return BatchRules(
            self.group_size,
            self.groups_per_batch,
            self.lag_bound,
            self.on_max_lag,
            self.gate,
            self.session_attempts,
            self.num_batches,
            self.on_failure,
            self.failed_reward,
        )

    @property
    def limits(self) -> Limits:
        return Limits(self.max_waiting, self.request_patience_s, self.engine_silence_s)


class TaskName(Body):
    task_id: str
    environment: str


class ClaimBody(Body):
    runner: str
    max: int = Field(ge=0, le=MAX_TOGETHER)
    wait_s: float = Field(0.0, ge=0)
    work: Work = "agent"
    """What it claims: sessions to run an agent on, or answers to score."""
    attempt: int | None = None
    """Of the flow that started the runner; one of an earlier attempt is released. None: the attempt under way
    when it is first heard."""
    tasks: dict[str, TaskName] = {}
    """By session: what it works on, of those that have begun since this was told last."""
    running: list[str] | None = None
    """Sessions the runner works on; those it was given and does not name are given out again. None: it says
    nothing of them, because thousands take a while to name."""


class ReleaseBody(Body):
    attempt: int | None = None
    """Of the flow that ends. None: whichever works on the run."""


class SessionBody(Body):
    """A session that somebody opens for an agent of their own."""

    run_id: RunName
    policy: str | None = None
    """As agents name the model. None: the run's."""
    group: str | None = Field(None, min_length=1)
    """Stored with the session; for whoever compares the rewards of sessions that name the same."""
    task_id: str = ""
    environment: str = ""
    metadata: dict[str, Any] = {}


class RewardBody(Body):
    reward: FiniteFloat
    reward_parts: dict[str, FiniteFloat] = {}


class FinishBody(Body):
    status: Literal["finished", "failed", "answered"]
    """answered: the agent is through, and another runner scores what it answered."""
    answer: str | None = None
    """As JSON."""
    reward: FiniteFloat | None = None
    reward_parts: dict[str, FiniteFloat | None] = {}
    error: str | None = None
    cause: Cause = "agent"
    """Of a failure."""
    task_id: str = ""
    environment: str = ""

    @property
    def has_reward(self) -> bool:
        """A finite one: JSON has no other way than null to write infinity and NaN."""
        return self.reward is not None and None not in self.reward_parts.values()

    def or_earlier(self, reward: float | None, reward_parts: Mapping[str, float]) -> FinishBody:
        """A reward that the session was given before counts where the report has none."""
        if self.reward is not None or reward is None:
            return self
        parts = {**reward_parts, **self.reward_parts}
        return self.model_copy(update={"reward": reward, "reward_parts": parts})

    @property
    def parting(self) -> str:
        """What an agent is told that still waits for a turn."""
        return "the session ran too long" if self.cause == "time" else "the session is over"

    def of_failure(self, error: str, cause: Cause, reward: float) -> FinishBody:
        """The same session's, if it failed so and is to count with this reward."""
        failure = {"status": "failed", "error": error, "cause": cause, "reward": reward, "reward_parts": {}}
        return self.model_copy(update=failure)


class FinishedReport(FinishBody):
    session_id: str


class FinishedBody(Body):
    """Reports of several sessions; those that are over already are passed over. One that is refused for good
    leaves the others as they are; where one can be sent again, all of them can."""

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
    """None: the whole run."""


class ResumeBody(Body):
    engine: str | None = None


class EvaluationBody(Body):
    num_tasks: int = Field(ge=1, le=MAX_TOGETHER)


class StageBody(BaseModel):
    model_config = ConfigDict(extra="allow")
    iteration: int
    stage: str


class HelloBody(Body):
    """What an engine says first."""

    run_id: str
    attempt: int
    lease_id: str
    epoch: int = Field(ge=0)
    """Of the starts of this lease the highest is the latest, whichever says hello first."""
    engine_id: str
    worker: str
    max_running: int = Field(ge=1)


BodyType = TypeVar("BodyType", bound=BaseModel)


def parse_body(model: type[BodyType], data: bytes) -> BodyType:
    """Raises ApiError with status 400 and a sentence that names the field."""
    try:
        return model.model_validate(parse_json(data or b"{}"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise ApiError(400, f"{where}: {first['msg']}", param=where) from None
