"""A request in vLLM's terms. It may take several requests there: an update ends one, and the next goes on."""

from __future__ import annotations

import asyncio
from typing import Any

from sf_core.engines.vllm.client import StreamDelta
from sf_core.models.counter import bits
from sf_core.types import Chunk, FinishReason, GenerationRequest

_REPORT_EVERY = 16
"""Number of tokens that are reported together, unless the request is streamed."""


class VllmTurn:
    """A request, what was sampled for it, and its stream if it has one."""

    def __init__(self, request: GenerationRequest, salt: str) -> None:
        self.request = request
        self.salt = salt
        """Only KV that was computed under the same salt is used."""
        self.sampled: list[int] = []
        self.vllm_request_id = ""
        """Id of its newest request to vLLM."""
        self.stream: asyncio.Task[None] | None = None
        self.has_answered = False
        """Whether the stream has brought tokens. If not, vLLM may not know it yet."""
        self.has_ended = False

    def body(self, vllm_request_id: str, model: str | None) -> dict[str, Any]:
        """The body of a vLLM request for the tokens that are still to be sampled. `model`: the server's name
        of the adapter that is to sample them; None: the server has no adapters."""
        request = self.request
        sampling = self.request.sampling
        self.vllm_request_id = vllm_request_id
        self.has_answered = False
        # vLLM draws from (seed, its own count of tokens), and counts anew in every request; 63 bits, because
        # torch takes signed ones
        seed = int(bits(sampling.seed, request.position + len(self.sampled))[0]) >> 1
        extra_arguments: dict[str, Any] = {}
        if request.grammar:
            num_sampled = request.position + len(self.sampled)
            extra_arguments = {"extra_args": {"grammar": request.grammar, "num_sampled": num_sampled}}
        return {
            "request_id": vllm_request_id,
            "token_ids": [*request.prompt_ids, *self.sampled],
            "stream": True,
            "cache_salt": self.salt,
            **({"model": model} if model else {}),
            "sampling_params": {
                "max_tokens": request.max_tokens - len(self.sampled),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": seed,
                "stop_token_ids": request.stop_token_ids,
                "ignore_eos": True,
                "detokenize": False,
                "logprobs": 0,
                "stream_interval": 1 if request.stream else _REPORT_EVERY,
                **extra_arguments,
            },
        }

    def append(self, delta: StreamDelta) -> FinishReason | None:
        """Append the tokens of a piece of the stream; returns why the request has ended,
        None if it has not."""
        self.has_answered = True
        self.sampled += delta.token_ids
        reason = delta.finish_reason if delta.finish_reason in ("stop", "length") else None
        if len(self.sampled) >= self.request.max_tokens:
            reason = reason or "length"
        self.has_ended = reason is not None
        return FinishReason(reason) if reason else None

    def chunks(self, delta: StreamDelta, version: int, finish: FinishReason | None) -> list[Chunk]:
        """The chunks that report the piece. vLLM joins tokens that its stream could not take in time;
        a streamed request gets one chunk for each token."""
        request_id = self.request.request_id
        ids = delta.token_ids
        logprobs = delta.logprobs
        if not ids and finish is None:
            return []
        # all but the last token have a chunk of their own if the request is streamed
        num_single = len(ids) - 1 if self.request.stream else 0
        chunks = [Chunk(request_id, [ids[i]], [logprobs[i]], version) for i in range(num_single)]
        return [*chunks, Chunk(request_id, ids[num_single:], logprobs[num_single:], version, finish)]
