"""Reports on sessions that have ended: the same one is answered again, another one is refused and counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.dataplane.api_schemas import FinishBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.runs.results import MAX_LOGGED_ENDS, Ends, digest_of
from sf_core.dataplane.sessions.claims import Claim, SessionSlot
from tests.bench.dataplane.planes import ServedPlane, say
from tests.bench.waits import wait_until

FINISHED = {"status": "finished", "reward": 1.0, "task_id": "t", "environment": "test"}
FAILED = {"status": "failed", "error": "it broke"}
ONE = {"group_size": 1, "groups_per_batch": 1}


def answered_claim(plane: ServedPlane, renderer: Renderer, **rules: Any) -> dict[str, Any]:
    """A claimed session whose agent has an answer."""
    plane.register(**{**ONE, "session_attempts": 3, **rules})
    plane.connect(lambda prompt, seed: say(renderer, "42"))
    [claim] = plane.claim()
    take_turn(plane, claim)
    return claim


def take_turn(plane: ServedPlane, claim: dict[str, Any]) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "6 * 7?"}]}
    plane.post(f"/sessions/{claim['session_id']}/v1/chat/completions", body)


def send(plane: ServedPlane, claim: dict[str, Any], report: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The status and body of the answer to a report on one session."""
    response = plane.http.post(f"/sessions/{claim['session_id']}/finish", json=report)
    return response.status_code, response.json()


def send_many(plane: ServedPlane, claim: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    reports = [{"session_id": claim["session_id"], **report}]
    return plane.post("/runs/run/finished", {"sessions": reports})


def counters(plane: ServedPlane) -> dict[str, int]:
    told = plane.get("/runs/run")["counters"]
    return {name: told.get(name, 0) for name in ("late_reports", "refused_reports")}


@pytest.mark.parametrize("report", [FINISHED, FAILED], ids=["finished", "failed"])
def test_the_same_report_is_answered_again_and_another_one_refused(
    served_plane: ServedPlane, renderer: Renderer, report: dict[str, Any]
) -> None:
    claim = answered_claim(served_plane, renderer)
    assert send(served_plane, claim, report)[0] == 200
    assert send(served_plane, claim, report)[0] == 200
    assert send_many(served_plane, claim, report) == {"finished": [claim["session_id"]], "refused": {}}
    for forged in (
        {**report, "reward": 1_000_000.0},
        {**FAILED, "error": "another"},
        {**report, "task_id": "x"},
    ):
        status, body = send(served_plane, claim, forged)
        assert (status, body["error"]["code"]) == (409, "already_ended")
        sentence = f"Session {claim['session_id']} has ended by another report: this report changes nothing."
        assert body["error"]["message"] == sentence
        assert send_many(served_plane, claim, forged)["refused"] == {claim["session_id"]: sentence}
    assert counters(served_plane) == {"late_reports": 0, "refused_reports": 6}


def test_a_run_whose_name_begins_like_a_session_has_no_part_in_its_reports(
    served_plane: ServedPlane, renderer: Renderer
) -> None:
    other = str(served_plane.run_dir / "other")
    for name in ("run.g0", "run.g0.0"):
        served_plane.register(run_id=name, run_dir=other + name, **ONE)
    claim = answered_claim(served_plane, renderer)
    assert claim["session_id"] == "run.g0.0.a0"
    assert send(served_plane, claim, FINISHED)[0] == 200
    assert send(served_plane, claim, FINISHED)[0] == 200
    assert send(served_plane, claim, {**FINISHED, "reward": 2.0})[0] == 409
    assert counters(served_plane)["refused_reports"] == 1


def test_the_first_report_is_what_trains(served_plane: ServedPlane, renderer: Renderer) -> None:
    claim = answered_claim(served_plane, renderer)
    send(served_plane, claim, FINISHED)
    send(served_plane, claim, {**FINISHED, "reward": 7.0})
    sealed = served_plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    assert (sealed["reward_mean"], sealed["refused_reports"]) == (1.0, 1)
    assert send(served_plane, claim, FINISHED)[0] == 404, "its batch is sealed"
    assert counters(served_plane) == {"late_reports": 1, "refused_reports": 1}


def test_a_report_of_a_session_whose_place_was_given_out_again_is_counted(
    served_plane: ServedPlane, renderer: Renderer
) -> None:
    first = answered_claim(served_plane, renderer)
    [second] = served_plane.claim(runner="a0", running=[])
    assert second["session_id"] != first["session_id"]
    status, body = send(served_plane, first, FINISHED)
    assert (status, body["error"]["code"]) == (404, "session_not_found")
    assert send_many(served_plane, first, FINISHED) == {"finished": [], "refused": {}}
    assert counters(served_plane) == {"late_reports": 2, "refused_reports": 0}
    take_turn(served_plane, second)
    assert send(served_plane, second, FINISHED)[0] == 200


def test_a_report_of_a_session_whose_time_is_over_is_counted(
    served_plane: ServedPlane, renderer: Renderer
) -> None:
    claim = answered_claim(served_plane, renderer, session_timeout_s=0.5)
    wait_until(lambda: served_plane.get("/runs/run")["counters"].get("failures.timeout", 0) == 1)
    # 503 until the end is on disk
    wait_until(lambda: send(served_plane, claim, FINISHED)[0] == 404)
    assert counters(served_plane) == {"late_reports": 1, "refused_reports": 0}


def test_an_opened_session_is_finished_again_without_an_error(
    served_plane: ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(**ONE)
    served_plane.connect(lambda prompt, seed: say(renderer, "42"))
    for report in (FINISHED, FAILED):
        opened = served_plane.post("/sessions", {"run_id": "run"})
        take_turn(served_plane, opened)
        assert send(served_plane, opened, report)[0] == 200
        assert send(served_plane, opened, report)[0] == 200
        assert send(served_plane, opened, {**report, "error": "another"})[0] == 409


SESSIONS = st.tuples(st.sampled_from(["train", "holdout", None]), st.integers(0, 3), st.integers(0, 3))


@given(st.lists(st.tuples(SESSIONS, st.sampled_from(["a", "b", ""])) | st.tuples(st.just("drop"), SESSIONS)))
def test_the_latest_report_is_known_until_its_group_is_dropped(steps: list[Any]) -> None:
    ends = Ends()
    known = dict[tuple[Any, int, int], str]()
    for first, second in steps:
        if first == "drop":
            split, group, _ = second
            if split is not None:
                ends.drop(split, group)
                known = {key: digest for key, digest in known.items() if key[:2] != (split, group)}
            continue
        (split, group, member) = first
        digest = second
        claim = None if split is None else Claim(SessionSlot(split, group, member), 0)
        ends.note(str(first), claim, digest)
        # of opened sessions it is also known that no report ended them
        if digest or claim is None:
            known[first] = digest
    for split in ("train", "holdout", None):
        for group in range(4):
            for member in range(4):
                key = (split, group, member)
                assert ends.find(str(key)) == (known.get(key) or None)


def test_the_reports_of_opened_sessions_take_bounded_memory() -> None:
    ends = Ends()
    for number in range(MAX_LOGGED_ENDS + 10):
        ends.note(f"s{number}", None, "digest")
    known = [ends.find(f"s{number}") is not None for number in range(MAX_LOGGED_ENDS + 10)]
    assert known == [False] * 10 + [True] * MAX_LOGGED_ENDS


REPORTS = st.fixed_dictionaries(
    {"status": st.sampled_from(["finished", "failed"])},
    optional={
        "reward": st.floats(-2, 2, allow_nan=False) | st.none(),
        "reward_parts": st.dictionaries(st.sampled_from("ab"), st.floats(-1, 1, allow_nan=False)),
        "step_rewards": st.dictionaries(st.sampled_from("ab"), st.floats(-1, 1, allow_nan=False)),
        "error": st.sampled_from(["x", "y"]),
        "cause": st.sampled_from(["agent", "time", "group"]),
        "task_id": st.sampled_from(["", "t"]),
    },
)


@settings(max_examples=200)
@given(REPORTS, REPORTS)
def test_a_digest_is_of_all_that_a_report_says(one: dict[str, Any], other: dict[str, Any]) -> None:
    first = FinishBody.model_validate(one)
    second = FinishBody.model_validate(other)
    is_same = first.model_dump_json() == second.model_dump_json()
    assert (digest_of(first) == digest_of(second)) is is_same
