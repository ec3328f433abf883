"""How an engine reaches the data plane: the address of the WebSocket, how it is opened, and the errors that
its failures are.
Both drivers use this module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from sf_core.engines import wire

HEARTBEAT_S = 20.0
"""Both ends send a ping this often and give up on the other when no pong comes for as long again. Pongs do
not wait for steps, so that a long step or the loading of weights does not look like silence."""

RETRYABLE_STATUSES = {408, 429, *range(500, 600)}
"""HTTP statuses of a data plane, or of a proxy before it, after which an engine tries again."""


class DataPlaneAddress:
    """The address of a data plane, and how an engine connects to it."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.replace("http", "ws", 1).rstrip("/") + "/engines"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # no max_queue: frames are read while the engine works, or pings would wait behind them; the requests
        # at an engine are bounded, so the queue is too
        self.options: dict[str, Any] = {
            "additional_headers": headers,
            "proxy": None,
            "compression": None,
            "max_size": None,
            "max_queue": None,
            "open_timeout": HEARTBEAT_S,
            "ping_interval": HEARTBEAT_S,
            "ping_timeout": HEARTBEAT_S,
            "close_timeout": 1.0,
        }
        """Options of websockets' `connect`."""

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Surround the call that connects. Raises ConnectionError if no data plane answers, or if it has no
        room now."""
        try:
            yield
        except InvalidStatus as error:
            if error.response.status_code not in RETRYABLE_STATUSES:
                raise
            body = bytes(error.response.body or b"").decode(errors="replace")[:200]
            raise ConnectionError(f"data plane at {self.url}: {error}: {body}") from error
        except (OSError, InvalidMessage) as error:
            raise ConnectionError(f"data plane at {self.url}: {error}") from error

    def interpret_close(self, error: ConnectionClosed) -> Exception:
        """The error to raise for a connection that has ended: a ConnectionError, after which the engine
        connects again, or a ValueError, because of a frame that the engine sent."""
        if error.rcvd is not None and error.rcvd.code == wire.BAD_FRAME:
            return ValueError(f"the data plane dropped this engine: {error.rcvd.reason}")
        return ConnectionError(f"data plane at {self.url}: {error}")
