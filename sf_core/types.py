"""Values that packages exchange: frozen data without behaviour, except for `Endpoint.client`.

Words follow docs/concepts/glossary.md: session, turn, branch, trajectory, group, lease, lag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from storage.media import ImageSpan as ImageSpan

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Ids = npt.NDArray[np.int32]
"""Token ids, [num_tokens]."""

_CUT = 65_536


def to_ids(ids: Sequence[int]) -> Ids:
    """The ids as an array; long lists in pieces, between which other threads run. Raises OverflowError if one
    has more than 32 bits."""
    if len(ids) <= _CUT:
        return np.array(ids, dtype=np.int32)
    starts = range(0, len(ids), _CUT)
    return np.concatenate([np.array(ids[start : start + _CUT], dtype=np.int32) for start in starts])


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
    images: tuple[ImageSpan, ...] = ()
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
    fault: str = ""
    """Why the engine cannot serve this request, although it serves others; empty: it can. Set on the last
    chunk only."""

    @classmethod
    def failed(cls, request_id: str, version: int, fault: str) -> Chunk:
        """The end of a request that the engine cannot serve."""
        return cls(request_id, [], [], version, FinishReason.ABORT, fault)


class WeightsRef(msgspec.Struct, frozen=True, array_like=True):
    """A reference to published weights; the tensors themselves are never passed between tasks."""

    version: int
    uri: str
    """Folder that holds model.safetensors."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task for an agent. In each session an agent works on one task. Your function `tasks` returns a
    `Task`.

    ```python
    Task("sum-train-0", "sums", "What is 2+3?", answer="5")
    ```
    """

    task_id: str
    """The id of the task, unique among all training and held-out tasks. In every run, the same id must
    belong to the same task."""
    environment: str
    """A name for this kind of task. For each name, the metrics contain the mean reward of the tasks with this
    name."""
    prompt: str
    """The user message for the agent. `sf try` and reports show this text."""
    answer: str = ""
    """The reference answer, for your reward function. The policy does not see this text."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Other data for your agent and your reward function."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward with details. A `Scored` may contain rewards of single answers, and numbers to record. Your
    reward function may return a `Scored` instead of a number.

    ```python
    Scored({"right": 1.0, "short": 0.1}, noted={"length": 12.0})
    ```
    """

    reward: float | Mapping[str, float]
    """The reward: a finite number, or named parts whose sum is the reward."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """Rewards of single answers. Each key is the `id` of the API response that contains the answer.
    SeamlessFlow does not add these rewards to `reward`. Only formulas with one advantage per turn use these
    rewards (`train.advantage`)."""
    noted: Mapping[str, float] = field(default_factory=dict)
    """Numbers to record. Each key is a name of your choice. SeamlessFlow stores the numbers with the session,
    and records the mean of each number as a metric. The numbers do not change the reward."""


class NotJudged(Exception):
    """Raise this in a reward function if an answer cannot be scored now, for example because a judge is
    unavailable.

    The worker scores the answer again until `rollout.score_timeout_s` expires. After that, another worker
    scores the answer. After `rollout.session_attempts` failed attempts, the data plane discards the group. A
    held-out session is then excluded from the mean reward."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The LLM endpoint of one session. Call `client()`, or pass the three fields to another LLM SDK.

    ```python
    client = endpoint.client()
    reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
    ```
    """

    base_url: str
    """The URL of the OpenAI API, which ends in `/v1`."""
    api_key: str
    """The key of this session. It is valid until the session ends."""
    model: str
    """The name of the policy, for the field `model` of a request."""

    def client(self) -> AsyncOpenAI:
        """A client of the OpenAI SDK with the key of this session.

        All clients of one event loop share their connections, so a client costs almost nothing. A new
        `AsyncOpenAI` in each session reads all CA certificates, which can cost more CPU time than the
        session. You do not need to close the client. A closed client does not close the connections of other
        sessions. The client has no timeout, because a request waits while the policy trains. Raises
        RuntimeError outside of an event loop.
        """
        # a second to import, and of use only where agents run
        from sf_core.clients import open_client

        return open_client(self.base_url, self.api_key)
