"""What the answers to an engine that connects mean."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import pytest
from websockets.exceptions import InvalidStatus
from websockets.http11 import Request, Response
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve

from sf_core.engines.drivers.driver import DataPlaneAddress
from tests.bench.waits import join


@contextmanager
def answering(status: int) -> Iterator[DataPlaneAddress]:
    """The way to a server that refuses every WebSocket with this status."""

    def refuse(connection: ServerConnection, request: Request) -> Response:
        return connection.respond(HTTPStatus(status), "all places are taken")

    with serve(lambda connection: None, "127.0.0.1", 0, process_request=refuse) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield DataPlaneAddress(f"http://127.0.0.1:{server.socket.getsockname()[1]}", None)
        finally:
            server.shutdown()
            join(thread)


@pytest.mark.parametrize("status", [408, 429, 502, 503])
def test_a_data_plane_without_room_is_tried_again(status: int) -> None:
    with answering(status) as line, pytest.raises(ConnectionError) as refused, line.connecting():
        connect(line.url, **line.options)
    assert str(refused.value) == (
        f"data plane at {line.url}: server rejected WebSocket connection: HTTP {status}: all places are taken"
    )


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_data_plane_that_refuses_is_not_tried_again(status: int) -> None:
    with answering(status) as line, pytest.raises(InvalidStatus), line.connecting():
        connect(line.url, **line.options)
