from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.emulation.kept_prefixes import KeptPrefixes


def test_what_was_left_first_is_forgotten_first() -> None:
    kept = KeptPrefixes(100)
    kept.keep("a", 40, num_running=0)
    kept.keep("b", 40, num_running=0)
    kept.keep("c", 40, num_running=0)
    assert [key in kept for key in "abc"] == [False, True, True]


def test_running_requests_need_room_too() -> None:
    kept = KeptPrefixes(100)
    kept.keep("a", 40, num_running=0)
    kept.keep("b", 40, num_running=50)
    assert [key in kept for key in "ab"] == [False, True]


def test_what_is_taken_is_kept_no_longer() -> None:
    kept = KeptPrefixes(100)
    kept.keep("a", 40, num_running=0)
    assert (kept.take("a"), kept.take("a")) == (40, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.booleans())))
def test_never_more_is_kept_than_finds_room(steps: list[tuple[int, int, bool]]) -> None:
    kept = KeptPrefixes(100)
    for key, num_tokens, is_kept in steps:
        if is_kept:
            kept.keep(key, num_tokens, num_running=0)
        else:
            kept.take(key)
    assert sum(kept.take(key) for key in range(6)) <= 100
