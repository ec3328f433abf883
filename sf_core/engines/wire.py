"""Frames between data plane and engines: MessagePack maps with one key, the kind of the frame.

Owns their encoding, for both ends. Knows nothing of sockets.

To the data plane: hello, updated, paused, chunks, yielded. To the engine: welcome or yield, then submit,
abort, update, pause, resume, yield.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack

from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling

UNKNOWN_RUN = 4404
"""Close code: the run is not registered yet, or no longer after a restart. The engine tries again."""

BAD_FRAME = 4400
"""Close code: the engine sent what no engine may send; the reason says what. It does not try again."""


def pack(kind: str, value: Any = True) -> bytes:
    return bytes(msgpack.packb({kind: value}))


def unpack(frame: bytes) -> tuple[str, Any]:
    """Raises ValueError if the frame is not one of ours."""
    message = msgpack.unpackb(frame, strict_map_key=False)
    if not isinstance(message, dict) or len(message) != 1:
        raise ValueError("expected a map with one key")
    return next(iter(message.items()))


def pack_requests(requests: Iterable[GenerationRequest]) -> bytes:
    return pack("submit", [_request_to_wire(request) for request in requests])


def unpack_requests(value: list[list[Any]]) -> list[GenerationRequest]:
    return [_request_from_wire(request) for request in value]


def pack_chunks(chunks: Iterable[Chunk]) -> bytes:
    return pack("chunks", [_chunk_to_wire(chunk) for chunk in chunks])


def unpack_chunks(value: list[list[Any]]) -> list[Chunk]:
    """Raises ValueError if these are no chunks."""
    try:
        return [_chunk_from_wire(chunk) for chunk in value]
    except TypeError as error:
        raise ValueError(f"sent no chunks where it said so: {error}") from None


def _request_to_wire(request: GenerationRequest) -> list[Any]:
    sampling = request.sampling
    return [
        request.request_id,
        pack_array("i", request.prompt_ids),
        request.position,
        request.max_tokens,
        request.stop_token_ids,
        [sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed],
        request.stream,
    ]


def _request_from_wire(value: list[Any]) -> GenerationRequest:
    request_id, prompt, position, max_tokens, stops, sampling, stream = value
    return GenerationRequest(
        request_id,
        unpack_array("i", prompt).tolist(),
        position,
        max_tokens,
        tuple(stops),
        Sampling(*sampling),
        stream,
    )


def _chunk_to_wire(chunk: Chunk) -> list[Any]:
    return [
        chunk.request_id,
        pack_array("i", chunk.token_ids),
        pack_array("f", chunk.logprobs),
        chunk.version,
        chunk.finish_reason,
    ]


def _chunk_from_wire(value: list[Any]) -> Chunk:
    request_id, token_ids, logprobs, version, finish_reason = value
    if not isinstance(request_id, str) or not isinstance(version, int):
        raise TypeError("expected a request id and a version")
    return Chunk(
        request_id,
        unpack_array("i", token_ids).tolist(),
        unpack_array("f", logprobs).tolist(),
        version,
        None if finish_reason is None else FinishReason(finish_reason),
    )


def pack_array(typecode: str, values: Sequence[int] | Sequence[float]) -> bytes:
    """Typecode i: int32, f: float32, in the machine's byte order (little-endian wherever engines run)."""
    values = values if isinstance(values, array) else array(typecode, values)
    return values.tobytes()


def unpack_array(typecode: str, data: bytes) -> array[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(data)
    return values
