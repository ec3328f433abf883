"""The parser against httptools' own, for which the same requests have no header `Upgrade`."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sf_core.dataplane.request_parser import RequestParser

UPGRADES = [
    b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAA\r\n",
    b"Upgrade: websocket\r\n",
    b"uPGRADE:x\r\n",
]
BODIES = [
    b"\r\n",
    b"content-length: 5\r\n\r\nGET /",
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
]
CONNECTIONS = [b"connection: Upgrade\r\n", b"Connection: keep-alive, upgrade, HTTP2-Settings\r\n"]
VERSIONS = [b"1.0", b"1.1"]

requests = st.lists(
    st.tuples(
        st.sampled_from([b"GET", b"POST"]),
        st.sampled_from(VERSIONS),
        st.sampled_from(CONNECTIONS),
        st.sampled_from(UPGRADES),
        st.sampled_from(BODIES),
    ),
    min_size=1,
    max_size=4,
)


class Heard:
    """What a parser tells, in a row; parts of bodies are joined."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return functools.partial(self._note, name)

    def _note(self, name: str, *told: bytes) -> None:
        if name in ("on_url", "on_body") and self.events[-1][0] == name:
            told = (self.events.pop()[1] + told[0],)
        self.events.append((name, *told))

    def without_upgrade(self) -> list[tuple[Any, ...]]:
        """All but the headers that ask for another protocol, and the borders of chunks."""
        headers = (b"upgrade", b"http2-settings")
        return [
            event
            for event in self.events
            if not (event[0] == "on_header" and event[1].lower() in headers)
            and not event[0].startswith("on_chunk")
        ]


@given(requests, st.lists(st.integers(0, 400), max_size=6))
@example([(b"POST", b"1.1", CONNECTIONS[0], UPGRADES[0], BODIES[1])] * 2, [])
def test_requests_are_read_as_if_they_had_no_upgrade(sent: list[tuple[bytes, ...]], cuts: list[int]) -> None:
    def encoded(asks: bool) -> bytes:
        return b"".join(
            b"%s /path HTTP/%s\r\n%s%s%s" % (method, version, connection, upgrade if asks else b"", body)
            for method, version, connection, upgrade, body in sent
        )

    plain = Heard()
    heard = Heard()
    reference = httptools.HttpRequestParser(plain)
    reference.set_dangerous_leniencies(lenient_data_after_close=True)
    reference.feed_data(encoded(False))
    parser = RequestParser(heard)
    data = encoded(True)
    places = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    for begin, end in itertools.pairwise(places):
        parser.feed_data(data[begin:end])
    assert heard.without_upgrade() == plain.without_upgrade()
    assert parser.should_keep_alive() == reference.should_keep_alive()
    assert not parser.should_upgrade()


def test_an_upgrade_that_is_wanted_ends_the_parsing() -> None:
    heard = Heard()
    head = b"GET /engines HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    with pytest.raises(httptools.HttpParserUpgrade) as raised:
        RequestParser(heard, lambda: True).feed_data(head + b"frames")
    assert raised.value.args == (len(head),)
    assert heard.events[-2:] == [("on_headers_complete",), ("on_message_complete",)]


@pytest.mark.parametrize("target", [b"example.org:80", b"/sessions/s/v1"])
def test_there_is_no_tunnel(target: bytes) -> None:
    heard = Heard()
    with pytest.raises(httptools.HttpParserError):
        RequestParser(heard).feed_data(
            b"CONNECT %s HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\n\r\n" % target
        )
    assert ("on_headers_complete",) not in heard.events


def test_many_requests_in_one_piece_are_read_one_after_the_other() -> None:
    heard = Heard()
    count = 3000
    RequestParser(heard).feed_data(b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * count)
    assert heard.events.count(("on_message_complete",)) == count
