"""Which connections find a place, whatever comes, shows a key and goes in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.dataplane.connections import MOST_REFUSED, ConnectionLimits
from tests.bench.properties import examples

MOST = 5


@dataclass(eq=False)
class Server:
    """Connections without HTTP."""

    places: ConnectionLimits = field(default_factory=lambda: ConnectionLimits(MOST, 60.0))
    open: list[Client] = field(default_factory=list)
    kept: set[Client] = field(default_factory=set)


@dataclass(eq=False)
class Client:
    server: Server

    def close_for_newcomer(self) -> None:
        assert self not in self.server.kept
        self.server.open.remove(self)

    def close_after_timeout(self) -> None:
        raise AssertionError("time does not pass")


STEP = st.tuples(st.sampled_from(["come", "keep", "release", "go"]), st.integers(0, 30))


@settings(max_examples=examples(300))
@given(st.lists(STEP, max_size=60))
async def test_who_is_kept_stays_and_others_give_way(steps: list[tuple[str, int]]) -> None:
    server = Server()
    for step, number in steps:
        if step == "come":
            newcomer = Client(server)
            server.open.append(newcomer)
            num_kept = len(server.kept)
            assert server.places.add(newcomer, len(server.open)) == (num_kept < MOST)
            # there is room for the newcomer, if only to be told that there is none
            assert newcomer in server.open
            assert len(server.open) <= max(MOST, num_kept + MOST_REFUSED)
        elif server.open:
            one = server.open[number % len(server.open)]
            if step == "keep":
                server.places.protect(one)
                server.kept.add(one)
            elif step == "release":
                server.places.unprotect(one)
                server.kept.discard(one)
            else:
                server.places.remove(one)
                server.open.remove(one)
                server.kept.discard(one)
