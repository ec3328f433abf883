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
        raise ValueError(f"the values must be valid JSON: {error}") from None
    return value


JudgeName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]


class JudgeConfig(Settings):
    """A model that reward functions ask. `url` or `model` says where it is."""

    url: Annotated[str, AfterValidator(check_server_url)] | None = None
    """Address of a server with the OpenAI API, for example http://HOST:8000/v1. The environment variable
    SF_JUDGE_KEY_NAME holds the server's key, where NAME is the judge's name in capitals. If that variable is
    not set, no key is sent."""
    name: str | None = Field(None, min_length=1)
    """Name of the model at that server. Empty: the first model that the server lists."""
    model: FilePath | None = None
    """Folder of a Hugging Face causal LM with a chat template, or the name of a model that `sf model` has
    made. Each worker tagged `reward` starts its own vLLM server for it; `make vllm` installs vLLM."""
    temperature: float = Field(0.0, ge=0, le=2)
    """Sampling temperature of the judge's replies. At 0 each worker asks equal questions only once."""
    max_tokens: int = Field(256, ge=1)
    """Maximum number of tokens in a reply."""
    timeout_s: float = Field(60.0, gt=0)
    """Timeout of one call, in seconds; then the call is retried."""
    concurrency: int = Field(16, ge=1, le=1024)
    """Number of calls that one worker makes at once while it scores sessions."""
    max_tokens_per_iteration: int | None = Field(None, ge=1)
    """Maximum number of tokens, questions and replies together, that all calls use between two batches. A run
    that uses more fails and says so. Empty: no limit."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> JudgeConfig:
        if (self.url is None) == (self.model is None):
            given = "neither" if self.url is None else "both"
            raise ValueError(f"give either url or model for the judge; given: {given}")
        if self.name is not None and self.url is None:
            raise ValueError(
                "name selects a model of the server at url: leave name out for a judge with model"
            )
        if self.max_tokens_per_iteration is not None and self.max_tokens_per_iteration < self.max_tokens:
            raise ValueError(
                f"max_tokens_per_iteration ({self.max_tokens_per_iteration}) is less than max_tokens of one "
                f"reply ({self.max_tokens}): raise max_tokens_per_iteration, or leave it out"
            )
        return self


class EnvironmentConfig(Settings):
    """The tasks, the agent that works on them, and the reward function that scores the agent's answers. All
    three come from a named environment unless functions of your own override them."""

    name: str = "quickstart"
    """Name of a built-in environment, or a class of your own, as package.module:Class. The warm start of the
    built-in policy uses the environment's demonstrations."""
    settings: Annotated[dict[str, Any], AfterValidator(_is_json), AfterValidator(expand_settings)] = Field({})
    """Settings of that environment. A text that begins with `~/` or `${VAR}/` is a path; `~` and the variable
    are replaced."""
    tasks: Reference | None = None
    """Function (split, index) -> Task, where split is "train" or "holdout". Equal arguments must give equal
    tasks. Empty: the environment's function."""
    agent: AnyAgent = None
    """The agent: a function (task, endpoint) -> answer, sync or async, or a command that runs once per
    session. The agent calls an ordinary LLM endpoint. Empty: the environment's agent."""
    reward: Reference | None = None
    """Function (task, answer) -> a number, or a mapping of named parts; the reward is the sum of the parts.
    Empty: the environment's function."""
    group_reward: Reference | None = None
    """Function (task, answers) -> one reward per answer of a training group, in the order of the answers, or
    None to discard the group. It is called once, after the last session of the group has answered. Held-out
    answers are always scored by `reward`. Empty: `reward` scores each answer alone."""
    judges: dict[JudgeName, JudgeConfig] = Field({})
    """Models that `reward` and `group_reward` may ask, by names of your choice. A function with a parameter
    `judges` receives all of them."""
    prepare: Reference | None = None
    """Function task -> async context manager. A worker enters it before the session (`rollout.prepare_ahead`)
    and leaves it after the agent has ended. The agent receives its value as the third argument. Empty: the
    environment's function, if the agent is the environment's too."""

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
    """Number of groups per batch whose agents run outside the cluster. The environment gives the other
    groups. If all groups come from outside, no worker needs the tag `agent`. 0: all groups come from the
    environment."""
    success: Success | None = None
    """Condition for a session to count as right, for `gate` and `curriculum`. Empty: the session's reward is
    at least 1, and the gate `varied` compares rewards instead."""
    gate: AnyGate = All()
    """Condition for a complete group to enter the batch. Other groups are discarded and replaced."""
    curriculum: Curriculum | None = None
    """Choice of tasks by their earlier results. Empty: each task is sampled once, in order."""
    spare_sessions: int = Field(0, ge=0, le=MAX_TOGETHER)
    """Number of sessions per group that start in addition to `group_size`. The first sessions to finish
    count; the rest are stopped. Short sessions finish first, so long answers are underrepresented. 0: no
    additional sessions."""
    least_sessions: int | None = Field(None, ge=1, le=MAX_TOGETHER)
    """Minimum number of successful sessions for a group to count, when all attempts of its other sessions
    have failed. Empty: every session of the group must succeed."""
    overlap: bool | None = None
    """true: the next batch is sampled while the trainer works on the current batch. false: strictly
    on-policy. Empty: the default of `pipeline`, or true without a pipeline."""
    max_lag: int = Field(1, ge=0)
    """Maximum lag of a token, in policy versions: the version being updated minus the version that sampled
    the token."""
    on_max_lag: Literal["wait", "drop"] = "wait"
    """Rule for unfinished sessions that would exceed `max_lag` in a later batch. wait: the current batch
    waits for them. drop: their groups are discarded and counted."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature of all sessions of the run, held-out sessions included. This value overrides the
    agent's request."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: only the most likely tokens whose probabilities sum to this value can be sampled.
    This value overrides the agent's request. 1: no limit."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens that can be sampled. This value overrides the agent's request. 0: no
    limit."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens sampled per turn. Empty: 64 for the built-in policy. With `policy.model`: 256,
    or half of `engine.context_length` if that is set and smaller than 512."""
    ignored_fields: tuple[UndoneField, ...] = ()
    """Unsupported request fields that are ignored, for example `presence_penalty`. Use this for clients that
    always send such a field. Requests with other unsupported fields are refused."""
    unseen_parts: Literal["replace", "refuse"] = "replace"
    """Rule for parts of tool results that the policy cannot read, for example images if the policy reads only
    text. replace: the part is replaced by a short text such as `[image left out]`, and the replacement is
    counted. refuse: the request is refused. In a user's message such a part is always refused."""
    max_picture_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens per picture, for a policy that sees pictures. Larger pictures are scaled down.
    Empty: the limit of the model's processor."""
    normalised: tuple[Normalisation, ...] = ("billing_header",)
    """Text removed from prompts because it changes on every turn and would break prefix matching.
    billing_header: the line `x-anthropic-billing-header: ...` in the system prompt of Claude Code."""
    concurrency: int = Field(128, ge=1, le=MAX_TOGETHER)
    """Number of sessions that one agent worker runs at once."""
    prepare_ahead: int = Field(0, ge=0, le=MAX_TOGETHER)
    """Number of sessions that each agent worker prepares in advance, by `environment.prepare`, in addition to
    the sessions that it runs. 0: a session is prepared when it starts, and preparation counts toward the
    session's timeout."""
    score_concurrency: int | None = Field(None, ge=1, le=MAX_TOGETHER)
    """Number of sessions that one worker scores at once, in addition to the sessions that it runs. Empty:
    sessions being scored count toward `concurrency`."""
    prepare_timeout_s: float = Field(600.0, gt=0)
    """Timeout of preparing a session, in seconds; then the session fails with the reason prepare_error."""
    session_timeout_s: float = Field(120.0, gt=0)
    """Timeout of a session's agent, in seconds; then `on_failure.timeout` applies. Time without a serving
    engine, for example while the run is paused, does not count."""
    score_timeout_s: float = Field(600.0, gt=0)
    """Timeout of scoring a session, in seconds; then `on_failure.reward_error` applies. If a judge was
    unavailable, another worker scores the answer again, up to `session_attempts` attempts in all."""
    reward_patience_s: float = Field(600.0, gt=0)
    """Timeout, in seconds, between the answer of an agent outside the cluster and its reward; then
    `on_failure.reward_error` applies. Time without a serving engine does not count."""
    request_patience_s: float = Field(600.0, gt=0)
    """Longest time, in seconds, that a request waits for an engine, pauses included; then the request is
    refused (503). Must exceed the time of a train step if no worker rolls out during the step."""
    session_attempts: int = Field(3, ge=1)
    """Maximum number of attempts per session, the first included. `on_failure` says which failures are
    retried."""
    on_failure: FailureRules = FailureRules()
    failed_reward: float = Field(0.0, ge=-1e9, le=1e9)
    """Reward of a failed session that is neither retried nor excluded. Held-out sessions are never
    excluded."""
    batch_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for a batch or an evaluation, in seconds; then the run fails and names the cause."""
    absence_timeout_s: float = Field(900.0, gt=0)
    """Longest wait for a batch or an evaluation, in seconds, while no engine or no agent worker is connected;
    then the run fails and names the missing part. An engine that is loading counts as connected. Must exceed
    the time to replace a host. Has no effect unless it is below `batch_timeout_s`."""

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
