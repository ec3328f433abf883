"""Values that packages exchange: frozen data without behaviour.

Words follow docs/concepts/glossary.md: session, turn, branch, trajectory, group, lease, lag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from storage.media import PictureSpan as PictureSpan

Ids = npt.NDArray[np.int32]
"""Token ids, [num_tokens]."""


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-turn token or a stop string was sampled."""
    LENGTH = "length"
    """The token budget or the context window is used up."""
    ABORT = "abort"
    """The engine was told to stop; the tokens so far are valid and generation may continue elsewhere."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn. Randomness is counter-based: (seed, position in the turn) decides each draw, so a
    sample depends neither on the batch it is in nor on where it is resumed."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    seed: int = 0
    """Unsigned 64-bit key of this turn."""


class GenerationRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to an engine: continue these ids."""

    request_id: str
    prompt_ids: Sequence[int]
    """Everything so far, including tokens of this turn that were sampled before an interruption."""
    position: int
    """Number of tokens of this turn sampled before; the counter of the first new draw."""
    max_tokens: int
    """Remaining budget, at least 1."""
    stop_token_ids: tuple[int, ...]
    sampling: Sampling
    stream: bool = False
    """True: report each token as it is sampled. False: the engine may gather several steps into one chunk."""
    grammar: str = ""
    """What the tokens of the whole turn must follow, in llguidance's Lark; empty: nothing. Log-probs are then
    those of the distribution over the tokens that it allows."""
    pictures: tuple[PictureSpan, ...] = ()
    """What the placeholders among `prompt_ids` show, in order."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Newly sampled tokens of one request, all sampled by the same weights."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    """Natural log of the probability the token had under the sampling distribution (after temperature,
    top-k and top-p), as float32 values."""
    version: int
    """Policy version of the weights that sampled these tokens."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk of a request. An end-of-turn token is part of token_ids."""


class WeightsRef(msgspec.Struct, frozen=True, array_like=True):
    """A reference to published weights; the tensors themselves are never passed between tasks."""

    version: int
    uri: str
    """Folder that holds model.safetensors."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task instance that an agent works on."""

    task_id: str
    """Unique over all splits; an id always means the same task."""
    environment: str
    prompt: str
    """The user message; also shown by `sf inspect`."""
    answer: str = ""
    """The reference that verification compares with; never shown to the agent."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward with what does not count in it."""

    reward: float | Mapping[str, float]
    steps: Mapping[str, float] = field(default_factory=dict)
    """What single answers of the policy earned, for formulas that give each turn its own credit, by the `id`
    that the API gave the answer or, of several choices, the first."""
    noted: Mapping[str, float] = field(default_factory=dict)
    """Numbers by names of your own that are stored with the session, and whose means are metrics."""


class NotJudged(Exception):
    """A reward that could not be had, through no fault of the answer: a judge is away, or its reply cannot be
    read. Raised by a reward function, the answer is scored again, for `rollout.score_timeout_s` and then by
    another worker. If all of `rollout.session_attempts` fail, its group is dropped; a held-out session leaves
    the mean."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The LLM endpoint of an agent. Any OpenAI SDK works with these three values."""

    base_url: str
    api_key: str
    model: str
