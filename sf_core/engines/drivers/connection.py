"""How an engine reaches the data plane: where its WebSocket is, how it is opened, and what its failures mean.
Both drivers use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from sf_core.engines import wire

HEARTBEAT_S = 20.0
"""Both ends send a ping this often and give up on the other when no pong comes for as long again. Pongs do
not wait for steps, so that a long step or the loading of weights does not look like silence."""

NOT_NOW = {408, 429, *range(500, 600)}
"""Statuses of a data plane, or of a proxy before it, after which an engine tries again."""


class Line:
    """The way to a data plane."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.replace("http", "ws", 1).rstrip("/") + "/engines"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # max_queue: read on while the engine works, or pings would wait behind frames; what is in flight at
        # an engine is bounded, so what can queue up here is too
        unset = dict.fromkeys(("proxy", "compression", "max_size", "max_queue"))
        times = dict.fromkeys(("ping_interval", "ping_timeout", "open_timeout"), HEARTBEAT_S)
        self.options: dict[str, Any] = {"additional_headers": headers, "close_timeout": 1.0, **unset, **times}
        """Options of websockets' `connect`."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Around the call that connects: raises ConnectionError if nobody is there, or has no room now."""
        try:
            yield
        except InvalidStatus as error:
            if error.response.status_code not in NOT_NOW:
                raise
            told = bytes(error.response.body or b"").decode(errors="replace")[:200]
            raise ConnectionError(f"data plane at {self.url}: {error}: {told}") from error
        except (OSError, InvalidMessage) as error:
            raise ConnectionError(f"data plane at {self.url}: {error}") from error

    def explain(self, error: ConnectionClosed) -> Exception:
        """What the end of a connection means: a ConnectionError, after which it is made again, or a
        ValueError, because of what the engine sent."""
        if error.rcvd is not None and error.rcvd.code == wire.BAD_FRAME:
            return ValueError(f"the data plane dropped this engine: {error.rcvd.reason}")
        return ConnectionError(f"data plane at {self.url}: {error}")
