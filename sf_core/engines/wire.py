"""Frames between data plane and engines: what either may send, as MessagePack.

Both ends are of one release. Knows nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
import numpy as np
from msgspec.structs import replace

from sf_core.types import Chunk, GenerationRequest, WeightsRef

UNKNOWN_RUN = 4404
"""Close code: the run is not registered yet, or no longer after a restart. The engine tries again."""

BAD_FRAME = 4400
"""Close code: the engine sent what no engine may send; the reason says what. It does not try again."""

ENGINE_FAILED = 4500
"""Close code: the engine cannot go on with its requests; the reason says why. It connects again."""

MAX_REASON_BYTES = 123
"""Longest reason of a WebSocket close frame."""


def fit_reason(reason: str) -> str:
    """As much of a reason as a close frame can hold."""
    return reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")


class Frame(msgspec.Struct, array_like=True):
    """A message, whose kind names its tag on the wire."""


class Hello(Frame, tag="hello"):
    """First frame of an engine."""

    run_id: str
    attempt: int
    lease_id: str
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    """Number of this start of the lease; the highest is the latest start, whichever says hello first."""
    engine_id: str
    worker: str
    max_running: Annotated[int, msgspec.Meta(ge=1)]


class Updated(Frame, tag="updated"):
    """The engine holds the weights of this version."""

    version: int


class Refused(Frame, tag="refused"):
    """The engine could not take this version, and serves on with the one it has."""

    version: int
    reason: str


class EnginePaused(Frame, tag="enginepaused"):
    pass


class Chunks(Frame, tag="chunks"):
    chunks: list[Chunk]


class Yielded(Frame, tag="yielded"):
    pass


class Welcome(Frame, tag="welcome"):
    weights: WeightsRef
    paused: bool


class Submit(Frame, tag="submit"):
    requests: list[tuple[GenerationRequest, bytes]]
    """Each without its prompt, and the int32 ids of that in the machine's byte order (little-endian wherever
    engines run)."""

    @classmethod
    def of(cls, requests: Iterable[GenerationRequest]) -> Submit:
        return cls(
            [(replace(r, prompt_ids=()), np.asarray(r.prompt_ids, np.int32).tobytes()) for r in requests]
        )

    def whole_requests(self) -> list[GenerationRequest]:
        return [
            replace(r, prompt_ids=np.frombuffer(prompt, np.int32).tolist()) for r, prompt in self.requests
        ]


class Abort(Frame, tag="abort"):
    request_ids: list[str] | None = None
    """None: all."""


class Update(Frame, tag="update"):
    weights: WeightsRef


class Pause(Frame, tag="pause"):
    paused: bool
    """False: sample again."""


class Yield(Frame, tag="yield"):
    """Give the device back."""

    reason: str


FromEngine = Hello | Updated | Refused | EnginePaused | Chunks | Yielded
ToEngine = Welcome | Submit | Abort | Update | Pause | Yield

pack: Callable[[Frame], bytes] = msgspec.msgpack.Encoder().encode

_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def read_from_engine(frame: bytes) -> FromEngine:
    """Raises ValueError, a predicate whose subject is the engine, if it may not send this."""
    try:
        return _from_engine.decode(frame)
    except ValueError as error:
        raise ValueError(f"the engine sent an invalid message: {error}") from None


def read_from_data_plane(frame: str | bytes) -> ToEngine:
    """Raises ValueError if the data plane may not send this."""
    if isinstance(frame, str):
        raise ValueError("the data plane sent a text frame; expected MessagePack")
    return _to_engine.decode(frame)
