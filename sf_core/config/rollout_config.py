"""Settings of what is worked on and how it is sampled: the environment, and rollout."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from sf_core.config.addresses import FilePath, check_server_url, expand_settings
from sf_core.config.failures import FailureRules
from sf_core.config.programs import AnyAgent
from sf_core.config.undone import Normalisation, UndoneField
from sf_core.recipes.curriculum import Curriculum
from sf_core.recipes.gates import All, AnyGate
from sf_core.recipes.outcomes import Success
from sf_core.settings import Reference, Settings

MAX_TOGETHER = 2**16
"""Most sessions of a group, worker or claim, groups of a batch, tasks of an evaluation: each is an object."""

BUILT_IN_TOKENS, BUILT_IN_CONTEXT = 64, 2048
"""`rollout.max_tokens` of the built-in policy, and its number of positions."""


def _is_json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expected values that JSON has: {error}") from None
    return value


JudgeName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]


class JudgeConfig(Settings):
    """A model that reward functions ask. `url` or `model` says where it is."""

    url: Annotated[str, AfterValidator(check_server_url)] | None = None
    """Address of a server with the OpenAI API, such as http://HOST:8000/v1. Its key is read from the
    environment variable SF_JUDGE_KEY_NAME, where NAME is the judge's in capitals; no key without it."""
    name: str | None = Field(None, min_length=1)
    """Name of the model at that server. Empty: the first that the server lists."""
    model: FilePath | None = None
    """Folder of a Hugging Face causal LM with a chat template, or the name of one that `sf model` has made.
    Each worker that carries `reward` serves it to itself by vLLM, which `make vllm` installs."""
    temperature: float = Field(0.0, ge=0, le=2)
    """Sampling temperature of its replies. At 0 an equal question is asked once per worker."""
    max_tokens: int = Field(256, ge=1)
    """Maximum number of tokens of a reply."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time, in seconds, that one call may take; beyond it the call is repeated."""
    concurrency: int = Field(16, ge=1, le=1024)
    """Calls that each worker that scores makes at once."""
    max_tokens_per_iteration: int | None = Field(None, ge=1)
    """Maximum number of tokens, of questions and replies, that all calls together may take between two
    batches. A run that takes more ends with a sentence that says so. Empty: no bound."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> JudgeConfig:
        if (self.url is None) == (self.model is None):
            given = "neither" if self.url is None else "both"
            raise ValueError(f"give one of url and model, which say where the judge is; given: {given}")
        if self.name is not None and self.url is None:
            raise ValueError("name is that of a model at url; a judge given as model needs none")
        if self.max_tokens_per_iteration is not None and self.max_tokens_per_iteration < self.max_tokens:
            raise ValueError(
                f"max_tokens_per_iteration ({self.max_tokens_per_iteration}) is below one reply of "
                f"max_tokens ({self.max_tokens}): raise it, or leave it out"
            )
        return self


class EnvironmentConfig(Settings):
    """The tasks, the agent that works on them, and the reward function that scores its answers: those of an
    environment, or functions of your own in their place."""

    name: str = "quickstart"
    """A shipped environment by its name (docs/your-agent.md), or one of your own: a class, as
    package.module:Class. The warm start of the built-in policy shows its demonstrations."""
    settings: Annotated[dict[str, Any], AfterValidator(_is_json), AfterValidator(expand_settings)] = Field({})
    """Settings of that environment. A text that begins with `~/` or `${VAR}/` is a path, in which `~` and
    variables are replaced."""
    tasks: Reference | None = None
    """Function (split, index) -> Task, split "train" or "holdout". Same arguments must give the same task.
    Empty: the environment's."""
    agent: AnyAgent = None
    """The agent: a function (task, endpoint) -> answer, sync or async, or a command that is run for each
    session. It sees an ordinary LLM endpoint. Empty: the environment's."""
    reward: Reference | None = None
    """Function (task, answer) -> a number, or a mapping of named parts whose sum is the reward. Empty: the
    environment's."""
    group_reward: Reference | None = None
    """Function (task, answers) -> a reward for each answer of a training group, in their order, or None to
    drop the group. It is called once, when the last session of the group has answered. Empty: each answer is
    scored by itself. Held-out answers are always scored by `reward`."""
    judges: dict[JudgeName, JudgeConfig] = Field({})
    """Models by names of your own, which `reward` and `group_reward` may ask: they get all of them as an
    argument if they have a parameter `judges`."""
    prepare: Reference | None = None
    """Function task -> async context manager, entered before the session runs (`rollout.prepare_ahead`) and
    left after its agent. What it gives is the agent's third argument. Empty: the environment's, if the agent
    is."""

    @property
    def served_judges(self) -> dict[str, str]:
        """The models of the judges that `reward` workers serve, by their names."""
        return {name: judge.model for name, judge in self.judges.items() if judge.model is not None}


class RolloutConfig(Settings):
    """How sessions are sampled, and when a batch is full."""

    group_size: int = Field(8, ge=1, le=MAX_TOGETHER)
    """Sessions sampled per task. Most advantages compare the rewards within this group."""
    groups_per_batch: int = Field(32, ge=1, le=MAX_TOGETHER)
    """Groups per batch; each iteration trains on one batch."""
    outside_groups: int = Field(0, ge=0, le=MAX_TOGETHER)
    """Groups of each batch that agents outside declare (docs/guides/agents/product.md); the others are of
    `environment`. With as many as `groups_per_batch` no worker needs to carry `agent`."""
    success: Success | None = None
    """When a session counts as right, for `gate` and `curriculum`. Empty: with a reward of at least 1. When
    it is empty, the gate `varied` compares rewards instead."""
    gate: AnyGate = All()
    """Which complete groups count. Others are dropped and replaced."""
    curriculum: Curriculum | None = None
    """Which tasks are sampled, by what came of them. Empty: each task once, in order."""
    spare_sessions: int = Field(0, ge=0, le=MAX_TOGETHER)
    """Sessions of a group that are begun beyond those that it needs. The first to finish count, and the rest
    are ended. Short sessions are the first to finish, so long answers count less often. 0: none."""
    least_sessions: int | None = Field(None, ge=1, le=MAX_TOGETHER)
    """Fewest sessions with which a group counts if others of it failed at their last attempt. Empty: all that
    it needs."""
    overlap: bool | None = None
    """Sample for the next batch while this one is trained on. Off: strictly on-policy. Empty: the default of
    the pipeline; on without a pipeline."""
    max_lag: int = Field(1, ge=0)
    """Maximum number of policy versions between the weights being updated and those that sampled a token."""
    on_max_lag: Literal["wait", "drop"] = "wait"
    """Rule for unfinished sessions that would exceed `max_lag` in a later batch. wait: the batch waits for
    them. drop: their groups are dropped and counted."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature of the run's sessions, held-out ones included; overrides the agent's request."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; overrides the agent's request."""
    top_k: int = Field(0, ge=0)
    """Top-k sampling, 0 for no limit; overrides the agent's request."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens sampled per turn. Empty: 64 for the built-in policy. With `policy.model` 256,
    or half of `engine.context_length` if that is named and gives less."""
    ignored_fields: tuple[UndoneField, ...] = ()
    """Unsupported request fields, such as `presence_penalty`, that are ignored although they would change an
    answer; for clients that always send them. Requests with other unsupported fields are refused."""
    unseen_parts: Literal["replace", "refuse"] = "replace"
    """What happens to parts of tool results that the policy is not shown, such as images, unless it sees
    pictures. replace: a sentence stands in their place, such as `[image left out]`, and they are counted.
    refuse: the request is refused. A user's message with such a part is always refused."""
    max_picture_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens of a picture, for a policy that sees; larger pictures are made smaller. Empty:
    what the model's processor allows."""
    normalised: tuple[Normalisation, ...] = ("billing_header",)
    """Text removed from prompts because it changes on every turn and would break prefix matching.
    billing_header: the line `x-anthropic-billing-header: ...` in the system prompt of Claude Code."""
    concurrency: int = Field(128, ge=1, le=MAX_TOGETHER)
    """Number of sessions that one agent worker runs at once."""
    prepare_ahead: int = Field(0, ge=0, le=MAX_TOGETHER)
    """Sessions that each agent worker prepares in advance, by `environment.prepare`, beside those it runs.
    0: a session is prepared when it starts, and preparation counts toward its timeout."""
    score_concurrency: int | None = Field(None, ge=1, le=MAX_TOGETHER)
    """Number of sessions that one worker scores at once, beside those that it runs. Empty: a session keeps
    its place while it is scored."""
    prepare_timeout_s: float = Field(600.0, gt=0)
    """Longest time to prepare a session; beyond it the session fails with prepare_error."""
    session_timeout_s: float = Field(120.0, gt=0)
    """Longest time that the agent of a session runs, pauses not counted; beyond it `on_failure.timeout`
    applies."""
    score_timeout_s: float = Field(600.0, gt=0)
    """Longest time to score a session; beyond it `on_failure.reward_error` applies. An answer that a judge
    could not judge until then is scored again by another worker, `session_attempts` times in all."""
    reward_patience_s: float = Field(600.0, gt=0)
    """Longest time between the answer of an agent outside and its reward, pauses not counted; beyond it
    `on_failure.reward_error` applies."""
    request_patience_s: float = Field(600.0, gt=0)
    """Longest wait of a request for an engine, pauses counted; then it is refused (503). Must exceed a train
    step if no worker rolls out meanwhile."""
    session_attempts: int = Field(3, ge=1)
    """Maximum number of attempts at a session that is retried on failure, the first included."""
    on_failure: FailureRules = FailureRules()
    failed_reward: float = Field(0.0, ge=-1e9, le=1e9)
    """Reward of a failed session that is neither retried nor excluded; held-out ones are never excluded."""
    batch_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for a batch or an evaluation; then the run fails and says what it waited for."""
    absence_timeout_s: float = Field(900.0, gt=0)
    """Longest wait for a batch or an evaluation while no engine, or no agent worker, is connected; then the
    run fails and says which is missing. A loading engine counts as connected. Must exceed the time to replace
    a host; has no effect unless it is below `batch_timeout_s`."""

    @property
    def turn_tokens(self) -> int:
        """`max_tokens`, that of the built-in policy if none is given."""
        return self.max_tokens or BUILT_IN_TOKENS

    @property
    def chooses(self) -> bool:
        """Whether what comes of a group decides what is sampled or kept, so that it is written down."""
        is_plain = self.gate.kind == "all" and self.curriculum is None
        return not is_plain or self.spare_sessions > 0 or self.least_sessions is not None

    @property
    def is_outside(self) -> bool:
        """Whether all training sessions are those of agents outside."""
        return self.outside_groups >= self.groups_per_batch
