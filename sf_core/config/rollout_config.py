"""Settings of the environment and of rollout: what is worked on, how it is sampled, and what happens to
failed sessions.

Owns the reasons of failures, which settings, statuses, manifests and metrics share.
sf_core/dataplane/runs/decide.py makes the decisions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from sf_core.config.addresses import FilePath, check_server_url, expand_settings
from sf_core.config.programs import AnyAgent
from sf_core.config.unsupported_fields import Normalisation, UnsupportedField
from sf_core.recipes.curriculum import Curriculum
from sf_core.recipes.gates import All, AnyGate
from sf_core.recipes.outcomes import Success
from sf_core.settings import Changeable, Derived, Reference, Settings

# fmt: off
Reason = Literal[
    "context_overflow", "timeout", "agent_error", "unparsed_call", "reward_error",
    "prepare_error", "not_recorded",
]
# fmt: on
"""Reason why a session failed. The settings have no rule for the last two reasons: these sessions are
retried, and then excluded. prepare_error: the environment of the session could not be prepared. not_recorded:
the session could not be exported."""

Rule = Literal["zero", "retry_then_zero", "retry_then_exclude"]

Status = Literal["finished", "finished_after_overflow", "not_judged"] | Reason
"""Status with which a session ended. finished_after_overflow: the session has an ordinary reward, although
its last request did not fit into the context window. not_judged: a held-out session without a reward, because
no reward could be computed."""

Cause = Literal["prepare", "agent", "code", "time", "reward", "group"]
"""Event that ended a failed session: an error while the session was prepared, an error of the agent (`code`:
an error that no answer of the policy excuses), the time limit of the agent, or an error of scoring. group:
the session has not failed, but `environment.group_reward` drops its group."""

CODE_ERRORS = (NameError, TypeError, AttributeError, ImportError, SyntaxError)
"""Errors that are always errors of the agent itself, whatever the policy has answered."""

LOST_IMAGE = "lost_picture"
"""The `decision` on a session if one of its images is missing or has changed when the batch is written."""

REASONS: tuple[Reason, ...] = get_args(Reason)


class FailureRules(Settings):
    """Rule for a failed session, by the reason of the failure. zero: the session ends with the reward
    `failed_reward`, and its sampled tokens are trained on. retry_then_zero: the session is retried with other
    random draws, up to `session_attempts` attempts in total; if all attempts fail, the rule zero applies.
    retry_then_exclude: the session is retried in the same way; if all attempts fail, the group of the session
    is excluded from the batch. A session that failed before the policy sampled a token always follows
    retry_then_exclude."""

    context_overflow: Rule = "zero"
    """Rule for a session whose agent raised an error after a request that did not fit into
    `engine.context_length`."""
    timeout: Rule = "zero"
    """Rule for a session that ran longer than `session_timeout_s`."""
    agent_error: Rule = "retry_then_exclude"
    """Rule for a session whose agent raised an error to which no other rule applies. This rule always applies
    to errors in the agent's code (NameError, TypeError, AttributeError, ImportError, SyntaxError)."""
    unparsed_call: Rule = "zero"
    """Rule for a session whose agent raised an error after the policy wrote a tool call that could not be
    parsed. If the agent raises no error after such a call, the session has not failed."""
    reward_error: Rule = "retry_then_exclude"
    """Rule for a session whose reward function raised an error, exceeded `score_timeout_s`, or returned a
    number that is not finite. This rule also applies if an external agent sent no reward within
    `reward_patience_s`."""

    def rule_for(self, reason: Reason) -> Rule:
        return getattr(self, reason, "retry_then_exclude")


def count_failures(statuses: Iterable[str]) -> dict[str, int]:
    """Number of failed sessions by reason; reasons that do not occur are left out."""
    counts = Counter(statuses)
    return {reason: counts[reason] for reason in REASONS if counts[reason]}


def sum_failures(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, several), Counter[str]()))


def failures_text(failures: Mapping[str, Any]) -> str:
    """Failures by reason as the text of a table cell."""
    return ", ".join(f"{reason} {number}" for reason, number in failures.items())


MAX_TOGETHER = 2**16
"""Maximum number of sessions per group, worker or claim, of groups per batch, and of tasks per evaluation.
Each of them is an object in memory."""

BUILT_IN_TOKENS = 64
BUILT_IN_CONTEXT = 2048
"""For the built-in policy: `rollout.max_tokens` if no value is given, and the number of positions."""


def _is_json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the values must be valid JSON: {error}") from None
    return value


LEAST_TEMPERATURE = 0.01
LEAST_TOP_P = 1e-6
MOST_TOP_K = 2**31 - 1
"""Limits of sampling that is not greedy. vLLM has the same least temperature: below it, logits overflow
float32. A smaller `top_p` keeps the most likely token alone, as this one does."""


def bound_temperature(value: float) -> float:
    """The temperature that is used; 0 is greedy."""
    return max(value, LEAST_TEMPERATURE) if value else 0.0


def bound_top_p(value: float) -> float:
    """The `top_p` that is used."""
    return max(value, LEAST_TOP_P)


JudgeName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]


class JudgeConfig(Settings):
    """A model that reward functions ask. Give either `url` or `model`."""

    url: Annotated[Annotated[str, AfterValidator(check_server_url)] | None, Changeable] = None
    """Address of a server with the OpenAI API, for example http://HOST:8000/v1. The environment variable
    SF_JUDGE_KEY_NAME contains the key of the server; NAME is the name of the judge in capitals. If this
    variable is not set, no key is sent."""
    name: str | None = Field(None, min_length=1)
    """Name of the model on the server at `url`. Empty: the first model that the server lists."""
    model: FilePath | None = None
    """Folder of a Hugging Face causal LM with a chat template, or the name of a model that `sf model` has
    downloaded. Each worker tagged `reward` starts its own vLLM server for the model. `make vllm` installs
    vLLM."""
    temperature: float = Field(0.0, ge=0, le=2)
    """Sampling temperature of the judge's replies. At temperature 0, each worker asks the same question only
    once and reuses the reply."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens in one reply of the judge, reasoning included. A reply that reaches this
    maximum is no verdict. Empty: the limit of the server, which in vLLM is the rest of the context."""
    timeout_s: Annotated[float, Changeable] = Field(120.0, gt=0)
    """Timeout of one call to the judge, in seconds. When it expires, the worker retries the call."""
    concurrency: Annotated[int, Changeable] = Field(16, ge=1, le=1024)
    """Maximum number of calls that one worker makes to the judge at a time."""
    max_tokens_per_iteration: Annotated[int | None, Changeable] = Field(None, ge=1)
    """Maximum number of tokens that all calls to the judge use between two batches, summed over questions and
    replies. A run that uses more tokens fails, with an error that names this setting. Empty: no limit."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> JudgeConfig:
        if (self.url is None) == (self.model is None):
            given = "neither" if self.url is None else "both"
            raise ValueError(f"set either `url` or `model` for the judge; given: {given}")
        if self.name is not None and self.url is None:
            raise ValueError(
                "`name` selects a model on the server at `url`, but this judge has no `url`: leave `name` out"
            )
        budget = self.max_tokens_per_iteration
        longest = self.max_tokens
        if budget is not None and longest is not None and budget < longest:
            raise ValueError(
                f"max_tokens_per_iteration ({self.max_tokens_per_iteration}) is less than max_tokens of one "
                f"reply ({self.max_tokens}): raise max_tokens_per_iteration, or leave it out"
            )
        return self


class EnvironmentConfig(Settings):
    """The tasks, the agent that works on the tasks, and the reward function that scores the agent's answers.
    The environment `name` provides all three. The settings `tasks`, `agent` and `reward` replace them with
    your own functions."""

    name: str = "quickstart"
    """Name of a built-in environment, or a class of your own, written as package.module:Class. The warm start
    of the built-in policy uses the environment's demonstrations."""
    settings: Annotated[dict[str, Any], AfterValidator(_is_json), AfterValidator(expand_settings)] = Field({})
    """Settings of the environment `name`. A text that begins with `~/` or `${VAR}/` is a path: `~` is
    replaced by the home folder, and `${VAR}` by the value of the environment variable VAR."""
    tasks: Reference | None = None
    """Function (split, index) -> Task, where split is "train" or "holdout". The same arguments must always
    give the same task. Empty: the tasks of the environment `name`."""
    agent: AnyAgent = None
    """The agent: a function (task, endpoint) -> answer, sync or async, or a command that runs once per
    session. The agent sends its requests to the LLM endpoint. Empty: the agent of the environment `name`."""
    reward: Reference | None = None
    """Function (task, answer) -> a number, or a mapping of named parts. The sum of the parts is the reward.
    Empty: the reward function of the environment `name`."""
    group_reward: Reference | None = None
    """Function (task, answers) -> one reward per answer of a training group, in the order of the answers, or
    None to discard the group. The function is called once, after the last session of the group has answered.
    Held-out answers are always scored by the function `reward`. Empty: the function `reward` scores each
    answer separately."""
    judges: dict[JudgeName, JudgeConfig] = Field({})
    """Models that the functions `reward` and `group_reward` may ask. You choose the name of each model. If a
    function has a parameter `judges`, the function receives all of these models."""
    prepare: Reference | None = None
    """Function task -> async context manager. The worker enters the context manager before the session starts
    (see `rollout.prepare_ahead`), and leaves it after the agent has ended. The agent receives the value of
    the context manager as its third argument. Empty: the function of the environment `name`, or no
    preparation if the setting `agent` is given."""

    @property
    def served_judges(self) -> dict[str, str]:
        """The models of the judges that `reward` workers serve, by their names."""
        return {name: judge.model for name, judge in self.judges.items() if judge.model is not None}


class RolloutConfig(Settings):
    """How sessions are sampled, and when a batch is complete."""

    group_size: int = Field(8, ge=1, le=MAX_TOGETHER)
    """Number of sessions per group. All sessions of a group work on the same task, and most advantages
    compare the rewards of the sessions."""
    groups_per_batch: int = Field(32, ge=1, le=MAX_TOGETHER)
    """Number of groups per batch. Each iteration trains on one batch."""
    outside_groups: int = Field(0, ge=0, le=MAX_TOGETHER)
    """Number of groups per batch that external agents work on. The environment provides the tasks
    of all other groups. If the agents of all groups run outside the cluster, no worker needs the tag `agent`.
    0: the environment provides all tasks."""
    success: Success | None = None
    """Condition under which `gate` and `curriculum` count a session as right. Empty: a session is right if
    its reward is at least 1, and the gate `varied` compares rewards instead of counting right sessions."""
    gate: AnyGate = All()
    """Condition under which a complete group enters the batch. Other groups are discarded and replaced."""
    curriculum: Curriculum | None = None
    """Rules that choose tasks by the results of earlier sessions. Empty: each task is sampled once, in
    order."""
    spare_sessions: int = Field(0, ge=0, le=MAX_TOGETHER)
    """Number of additional sessions that start per group. The group is complete when `group_size` sessions
    have finished; the remaining sessions are then stopped. Short sessions finish first, so long answers are
    underrepresented in the batch. 0: no additional sessions."""
    least_sessions: int | None = Field(None, ge=1, le=MAX_TOGETHER)
    """Minimum number of successful sessions in a group. If all attempts of the other sessions have failed, a
    group with this number of successful sessions is complete. A group with fewer successful sessions is
    discarded. Empty: every session of the group must succeed."""
    overlap: bool | None = None
    """true: the engines sample the next batch while the trainer works on the current batch. false: the run is
    strictly on-policy. Empty: the default of `pipeline`, or true if `pipeline` is empty."""
    max_lag: int = Field(1, ge=0)
    """Maximum lag of a trained token, in policy versions. The lag is the version of the weights in training
    minus the version of the weights that sampled the token."""
    on_max_lag: Literal["wait", "drop"] = "wait"
    """Rule for unfinished sessions whose tokens would exceed `max_lag` in a later batch. wait: the current
    batch waits for these sessions. drop: the groups of these sessions are discarded and counted."""
    temperature: Annotated[float, AfterValidator(bound_temperature)] = Field(1.0, ge=0, le=2)
    """Sampling temperature of all sessions of the run, including held-out sessions. This value replaces the
    temperature in the agent's request. 0: greedy sampling. Values between 0 and 0.01 become 0.01."""
    top_p: Annotated[float, AfterValidator(bound_top_p)] = Field(1.0, gt=0, le=1)
    """Nucleus sampling: the engine samples from the smallest set of most likely tokens whose probabilities
    sum to at least this value. This value replaces `top_p` in the agent's request. 1: no limit."""
    top_k: int = Field(0, ge=0, le=MOST_TOP_K)
    """Number of most likely tokens from which the engine samples. This value replaces `top_k` in the agent's
    request. 0: no limit."""
    max_tokens: Annotated[int | None, Derived] = Field(None, ge=1)
    """Maximum number of sampled tokens per turn. Empty: 64 for the built-in policy. With `policy.model`: 256,
    or half of `engine.context_length` if that setting is smaller than 512."""
    ignored_fields: tuple[UnsupportedField, ...] = ()
    """Names of unsupported request fields to ignore, for example `presence_penalty`. Use this setting for
    clients that always send such a field. A request with any other unsupported field is refused."""
    unseen_parts: Literal["replace", "refuse"] = "replace"
    """Rule for parts of tool results that the policy cannot read, for example images if the policy reads only
    text. replace: the part is replaced by a short text such as `[image left out]`, and the replacement is
    counted. refuse: the request is refused. A user's message with such a part is always refused."""
    max_picture_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens per image, for a policy that reads images. Larger images are scaled
    down. Empty: the limit of the model's image processor."""
    normalised: tuple[Normalisation, ...] = ("billing_header",)
    """Texts that are removed from prompts because they change on every turn. With such a text, a turn would
    not begin with the tokens of the previous turn. billing_header: the line `x-anthropic-billing-header: ...`
    in the system prompt of Claude Code."""
    concurrency: int = Field(128, ge=1, le=MAX_TOGETHER)
    """Maximum number of sessions that one agent worker runs at a time."""
    prepare_ahead: int = Field(0, ge=0, le=MAX_TOGETHER)
    """Number of sessions that each agent worker prepares in advance with `environment.prepare`, in addition
    to the sessions that the worker runs. 0: a session is prepared when it starts, and the preparation counts
    toward `session_timeout_s`."""
    score_concurrency: int | None = Field(None, ge=1, le=MAX_TOGETHER)
    """Maximum number of sessions that one worker scores at a time, in addition to the sessions that the
    worker runs. Empty: sessions that are being scored count toward `concurrency`."""
    prepare_timeout_s: float = Field(600.0, gt=0)
    """Timeout for preparing a session, in seconds. When it expires, the session fails with the reason
    `prepare_error`."""
    session_timeout_s: float = Field(120.0, gt=0)
    """Timeout for the agent of a session, in seconds. When it expires, `on_failure.timeout` applies. Time
    without a serving engine, for example while the run is paused, does not count."""
    score_timeout_s: float = Field(600.0, gt=0)
    """Timeout for scoring a session, in seconds. When it expires, `on_failure.reward_error` applies. If a
    judge is unavailable, another worker scores the answer again, up to `session_attempts` attempts in
    total."""
    reward_patience_s: float = Field(600.0, gt=0)
    """Timeout, in seconds, for an external agent to send the reward after its answer. When it
    expires, `on_failure.reward_error` applies. Time without a serving engine does not count."""
    request_patience_s: float = Field(600.0, gt=0)
    """Maximum time, in seconds, that a request waits for an engine, including the time of pauses. When it
    expires, the request is refused (503). If no worker rolls out during a train step, this time must exceed
    the time of a train step."""
    session_attempts: int = Field(3, ge=1)
    """Maximum number of attempts per session, including the first attempt. `on_failure` says which failures
    are retried."""
    on_failure: FailureRules = FailureRules()
    failed_reward: float = Field(0.0, ge=-1e9, le=1e9)
    """Reward of a failed session that is neither retried nor excluded. A held-out session is never
    excluded."""
    batch_timeout_s: float = Field(1800.0, gt=0)
    """Maximum time, in seconds, that the run waits for a batch or an evaluation. When it expires, the run
    fails with an error that names the cause."""
    absence_timeout_s: float = Field(900.0, gt=0)
    """Maximum time, in seconds, that the run waits for a batch or an evaluation while no engine or no agent
    worker is connected. When it expires, the run fails with an error that names the missing part. An engine
    that is loading counts as connected. Must exceed the time to replace a host. Has an effect only if this
    time is less than `batch_timeout_s`."""

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
    def is_external(self) -> bool:
        """Whether all training sessions are those of external agents."""
        return self.outside_groups >= self.groups_per_batch
