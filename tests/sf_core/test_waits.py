import logging
import threading
import time

import pytest

from sf_core import waits
from sf_core.waits import Wait, collect_waits, long_waits, waiting_for
from tests.bench.waits import patience


def test_a_long_wait_says_what_it_waits_for_and_says_it_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "FIRST_S", 0.01)
    monkeypatch.setattr(waits, "THEN_S", 0.01)
    told: list[str] = []
    twice = threading.Event()

    def tell(wait: Wait) -> None:
        told.append(wait.describe())
        if len(told) == 2:
            twice.set()

    with (
        caplog.at_level(logging.WARNING),
        waiting_for("batch 3", 60, tell=tell) as wait,
    ):
        wait.reason = "2 of 8 groups"
        assert twice.wait(patience())
    assert told[1] == "batch 3: 2 of 8 groups"
    assert "for batch 3: 2 of 8 groups" in caplog.text
    assert "waiting since" in caplog.text and "until" in caplog.text


def test_a_short_wait_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with waiting_for("batch 3", 60):
        pass
    assert caplog.text == ""


def test_a_wait_past_its_deadline_says_what_it_waited_for_and_since_when() -> None:
    with (
        pytest.raises(
            TimeoutError, match=r"waited 0 s, since \d\d:\d\d:\d\d, for r0 to yield: r0 is leaving"
        ),
        waiting_for("r0 to yield", 0.0, reason=lambda: "r0 is leaving") as wait,
    ):
        wait.check()


def test_a_wait_before_its_deadline_goes_on() -> None:
    with waiting_for("batch 3", 60) as wait:
        wait.check()


def test_waits_that_took_time_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    with collect_waits() as collected:
        monkeypatch.setattr(waits, "SHORTEST_S", 60.0)
        with waiting_for("nothing", 60):
            pass
        monkeypatch.setattr(waits, "SHORTEST_S", 0.01)
        with waiting_for("batch 3", 60):
            time.sleep(0.03)
    assert [wait["what"] for wait in collected] == ["batch 3"]
    assert collected[0]["end"] > collected[0]["start"]


def test_waits_that_go_on_and_have_lasted_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "FIRST_S", 0.0)
    with waiting_for("batch 3", 60, reason="2 of 8 groups"), waiting_for("r0 to yield", 30):
        batch, lease = (wait.facts() for wait in long_waits())
    assert batch["what"] == "batch 3: 2 of 8 groups" and lease["what"] == "r0 to yield"
    assert batch["until"] - batch["since"] == 60
    assert long_waits() == []


def test_a_wait_that_has_just_begun_is_not_listed() -> None:
    with waiting_for("batch 3", 60):
        assert long_waits() == []
