"""vLLM's HTTP: the only module that knows its routes, checked against 0.32.0 and 0.33.0. Most of them are
development routes, which vLLM may change in any version.

A turn may take several requests at vLLM: an update of the weights ends one request, and the next continues
the turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import orjson

from sf_core.engines.protocol import EngineLostError
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


_GENERATE = "/inference/v1/generate"
_COMPLETIONS = "/v1/completions"
_LOAD_ADAPTER = "/v1/load_lora_adapter"
_UNLOAD_ADAPTER = "/v1/unload_lora_adapter"

_ANSWER_TIMEOUT_S = 60.0
"""Longest wait for the answer to a command that does no work."""

_WORK_TIMEOUT_S = 600.0
"""Longest wait for weights to be read or for memory to be moved."""


class RequestRefusedError(ValueError):
    """vLLM does not take this request; it takes others."""


class RequestFailedError(RequestRefusedError):
    """vLLM failed at this request, but says that it is healthy."""


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """Tokens of a stream, in the order they came."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    """vLLM's word, on the last piece."""
    labels: frozenset[str]
    """Names of the weights that sampled the request so far; only on the last piece."""
    prompt_ids: list[int]
    """What the tokens go on from; only on the first piece, of a request that asks for it."""
    images: list[dict[str, int]]
    """Where each image is in `prompt_ids`: its `offset` and `length`."""


class VllmClient:
    """A vLLM server at a URL, or behind a Unix socket. Belongs to one event loop. Every method raises
    EngineLostError if the server does not answer or has failed."""

    def __init__(
        self, url: str = "http://vllm", *, socket: str | None = None, key: str | None = None
    ) -> None:
        self._url = url.rstrip("/")
        # vLLM closes idle connections, and a request on one that it is closing fails: each gets a fresh one
        connector = (
            aiohttp.UnixConnector(socket, limit=0, force_close=True)
            if socket
            else aiohttp.TCPConnector(limit=0, force_close=True)
        )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, read_bufsize=2**20)

    async def close(self) -> None:
        await self._session.close()

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[StreamDelta]:
        """Stream the tokens of a request. Raises RequestRefusedError."""
        data = orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_TIMEOUT_S)
        with _raise_engine_lost(_GENERATE):
            async with self._session.post(
                self._url + _GENERATE, data=data, headers=headers, timeout=timeout
            ) as response:
                if response.status != 200:
                    raise await self._explain_failure(response.status, await response.text())
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    # errors come in streams of status 200 too
                    if "choices" not in (message := orjson.loads(line[6:])):
                        error = message.get("error") or message
                        text = str(error.get("message") or error)
                        raise await self._explain_failure(int(error.get("code") or 500), text)
                    yield _read_delta(message)

    async def _explain_failure(self, status: int, text: str) -> Exception:
        """The error to raise for a request that was answered with this status."""
        answer = f"vLLM: {status} {text}"
        if status == 404:
            # the request is right, and the server lacks the adapter that it names
            return EngineLostError(answer)
        if 400 <= status < 500:
            return RequestRefusedError(f"vLLM refused a request: {text}")
        with suppress(EngineLostError):
            await self.check_health()
            return RequestFailedError(answer)
        return EngineLostError(answer)

    async def find_model(self) -> tuple[str, int | None]:
        """The name by which the server's own model is asked, and how many tokens it takes, if it says so.
        Raises as `score` does."""
        model = (await self._request_json("GET", "/v1/models"))["data"][0]
        return str(model["id"]), model.get("max_model_len")

    async def score(self, model: str, token_ids: Sequence[int]) -> list[Any]:
        """The log-prob of each token after those before it, at temperature 1 over the whole vocabulary; None
        for the first. An id outside the vocabulary ends the server. Raises RequestRefusedError, or ValueError
        if the key of a teacher is rejected."""
        # vLLM ignores temperature and top-p for prompt log-probs, and refuses to sample nothing
        options = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 1}
        answer = await self._request_json(
            "POST", _COMPLETIONS, {"model": model, "prompt": [*token_ids], **options}
        )
        prompt_logprobs = answer["choices"][0]["prompt_logprobs"]
        # vLLM gives null for the first token, and a dictionary by token id for each later one
        return [
            by_id and by_id[str(token)]["logprob"]
            for token, by_id in zip(token_ids, prompt_logprobs, strict=True)
        ]

    async def _request_json(self, method: str, path: str, body: Any = None) -> Any:
        status, answer = await self._request(method, path, body, _WORK_TIMEOUT_S)
        if status == 200:
            return orjson.loads(answer)
        failure = f"{path}: {status} {_read_message(answer)}"
        if status == 401:
            raise ValueError(
                f"the server at {self._url} rejected the key: set SF_TEACHER_KEY to the server's API key"
            )
        # 408 (timeout) and 429 (too many requests) pass by themselves
        is_refused = 400 <= status < 500 and status not in (408, 429)
        raise RequestRefusedError(failure) if is_refused else EngineLostError(f"vLLM: {failure}")

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests, whose streams then end. Ids that are not known to vLLM are ignored, also those
        that it does not know yet."""
        # the token endpoint gives its requests this prefix
        ids = [f"generate-tokens-{request_id}" for request_id in request_ids]
        await self._command("/abort_requests", {"request_ids": ids})

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """Sample nothing until `resume`. abort: every stream ends; keep: they go on with `resume`. KV
        stays."""
        await self._command("/pause", mode=mode, clear_cache="false")

    async def resume(self) -> None:
        await self._command("/resume")

    async def reload_weights(self, folder: str) -> None:
        """Take the weights of a model folder, while paused."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self._command("/collective_rpc", call, timeout_s=_WORK_TIMEOUT_S)

    async def load_adapter(self, name: str, folder: str) -> None:
        """Have requests that name this model sampled by the adapter in this folder, which must stay. Raises
        ValueError if it is not taken."""
        # never in place: the server would keep the KV of the adapter before, and read the file in every step
        body = {"lora_name": name, "lora_path": folder}
        status, answer = await self._request("POST", _LOAD_ADAPTER, body, _WORK_TIMEOUT_S)
        if status != 200:
            raise ValueError(f"vLLM refused the adapter in {folder}: {_read_message(answer)}")

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests that name this model; those that are there go on. It need not be there."""
        status, answer = await self._request("POST", _UNLOAD_ADAPTER, {"lora_name": name})
        if status not in (200, 404):
            raise EngineLostError(f"vLLM answered {_UNLOAD_ADAPTER} with {status}: {_read_message(answer)}")

    async def set_weight_version(self, label: str) -> None:
        """Give the weights a name, which finished requests then carry."""
        await self._command("/update_weight_version", {"new_version": label})

    async def sleep(self, level: int) -> None:
        """Give the device's memory back. 1: weights move to the host's memory; 2: they are dropped."""
        await self._command("/sleep", timeout_s=_WORK_TIMEOUT_S, level=str(level))

    async def wake_up(self, tag: Literal["weights", "kv_cache"]) -> None:
        await self._command("/wake_up", timeout_s=_WORK_TIMEOUT_S, tags=tag)

    async def reset_prefix_cache(self) -> None:
        """Forget the KV of requests that have ended."""
        await self._command("/reset_prefix_cache")

    async def reset_encoder_cache(self) -> None:
        """Drop the cached features of images, while paused. With other weights the server would end at the
        next image whose features it still has."""
        await self._command("/reset_encoder_cache")

    async def check_health(self) -> None:
        await self._command("/health", method="GET")

    async def _command(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        timeout_s: float = _ANSWER_TIMEOUT_S,
        **query: str,
    ) -> bytes:
        status, answer = await self._request(method, path, body, timeout_s, query)
        if status != 200:
            raise EngineLostError(
                f"vLLM answered {path} with {status}: {answer.decode(errors='replace')[:1000]}"
            )
        return answer

    async def _request(
        self, method: str, path: str, body: Any, timeout_s: float = _ANSWER_TIMEOUT_S, query: Any = None
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with _raise_engine_lost(path):
            async with self._session.request(
                method, self._url + path, json=body, params=query, timeout=timeout
            ) as response:
                return response.status, await response.read()


@contextmanager
def _raise_engine_lost(path: str) -> Iterator[None]:
    try:
        yield
    except EngineLostError:
        raise
    # a session that was closed meanwhile raises RuntimeError
    except (aiohttp.ClientError, OSError, RuntimeError) as error:
        raise EngineLostError(
            f"the request {path} to vLLM failed: {str(error) or type(error).__name__}"
        ) from error


def _read_delta(message: dict[str, Any]) -> StreamDelta:
    (choice,) = message["choices"]
    token_ids = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    spans = choice.get("weight_versions") or []
    return StreamDelta(
        token_ids,
        [entry["logprob"] for entry in content],
        choice["finish_reason"],
        frozenset(span["version"] for span in spans),
        message.get("prompt_token_ids") or [],
        (message.get("mm_placeholders") or {}).get("image") or [],
    )


def _read_message(answer: bytes) -> str:
    """The error message in the body of an answer."""
    with suppress(ValueError, TypeError, KeyError):
        return str(orjson.loads(answer)["error"]["message"])
    return answer.decode(errors="replace")[:1000]
