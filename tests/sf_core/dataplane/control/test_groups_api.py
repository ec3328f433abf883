"""Groups that external agents declare over HTTP: where they are refused, and that they are trained on."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.client import MAX_FAILURES_IN_A_ROW
from tests.bench import waits
from tests.bench.dataplane import planes
from tests.bench.dataplane.served_runs import stored

OUTSIDE = {"outside_groups": 1, "groups_per_batch": 1, "group_size": 2}
GROUPS = "/runs/run/groups"


def use(session: dict[str, Any], key: str = "none") -> None:
    with OpenAI(base_url=session["base_url"], api_key=key, max_retries=0, timeout=waits.patience()) as agent:
        agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])


def finish(plane: planes.ServedPlane, session: dict[str, Any], **report: Any) -> None:
    plane.client.post(f"/sessions/{session['session_id']}/finish", {"status": "finished", **report})


def test_a_declared_group_fills_a_batch(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    served_plane.register(**OUTSIDE)
    served_plane.connect(planes.answering(renderer, "one", "two"))
    group = served_plane.client.post(GROUPS, {"task_id": "ticket", "size": 3})
    assert [session["member"] for session in group["sessions"]] == [0, 1, 2]
    for number, session in enumerate(group["sessions"]):
        use(session)
        finish(served_plane, session, status="answered")
        finish(served_plane, session, reward=number / 2)
    batch = served_plane.get("/runs/run/batches/0")
    assert (batch["ready"], batch["runners"]) == (True, None)
    sealed = served_plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    assert (sealed["groups"], sealed["sessions"], sealed["reward_mean"]) == ([group["group"]], 3, 0.5)


def test_a_session_goes_on_whose_group_does_not_count_any_more(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(**OUTSIDE)
    served_plane.connect(planes.answering(renderer, "one"))
    failing, going_on = served_plane.client.post(GROUPS, {})["sessions"]
    use(going_on)
    finish(served_plane, failing, status="failed")
    use(going_on)
    finish(served_plane, going_on, reward=1.0)
    waits.wait_until(lambda: bool(stored(served_plane.run_dir / "run")))
    assert {row.session_id for _, row in stored(served_plane.run_dir / "run")} == {going_on["session_id"]}


@pytest.mark.parametrize("cause", ["agent", "group", "time"])
def test_clients_that_fail_do_not_end_the_run(served_plane: planes.ServedPlane, cause: str) -> None:
    served_plane.register(**OUTSIDE | {"groups_per_batch": 2})
    for _ in range(MAX_FAILURES_IN_A_ROW // 2 + 1):
        for session in served_plane.client.post(GROUPS, {})["sessions"]:
            finish(served_plane, session, status="failed", cause=cause, error="it broke")
    batch = served_plane.get("/runs/run/batches/0")
    assert (batch["failures_in_a_row"], batch["fault"]) == (0, "")


def test_clients_that_succeed_do_not_hide_that_all_of_the_runs_own_sessions_fail(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(**OUTSIDE | {"groups_per_batch": 2}, session_attempts=9)
    served_plane.connect(planes.answering(renderer, "one"))
    for number in range(1, 4):
        [own] = served_plane.claim()
        served_plane.post(f"/sessions/{own['session_id']}/finish", {"status": "failed", "error": "KeyError"})
        if number == 1:
            for session in served_plane.client.post(GROUPS, {})["sessions"]:
                use(session)
                finish(served_plane, session, reward=1.0)
        assert served_plane.get("/runs/run/batches/0")["failures_in_a_row"] == number


def test_what_no_batch_has_a_place_for_is_to_be_declared_later(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(**OUTSIDE, lag_bound=0)
    served_plane.connect(planes.answering(renderer, "one"))
    first = served_plane.client.post(GROUPS, {"name": "first"})
    assert served_plane.client.post(GROUPS, {"name": "first"})["sessions"] == first["sessions"]
    refused = served_plane.client.http.post(GROUPS, json={"name": "second"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "no_place")
    assert float(refused.headers["retry-after"]) > 0
    for session in first["sessions"]:
        use(session)
        finish(served_plane, session, reward=1.0)
    served_plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    assert served_plane.client.http.post(GROUPS, json={"name": "second"}).status_code == 429
    served_plane.post("/runs/run/weights", {"version": 1, "uri": "w"})
    assert served_plane.client.post(GROUPS, {"name": "second"})["sessions"]


def test_a_run_that_takes_none_says_which_setting_lets_it(served_plane: planes.ServedPlane) -> None:
    served_plane.register()
    refused = served_plane.client.http.post(GROUPS, json={})
    assert refused.status_code == 409
    said = refused.json()["error"]["message"]
    assert "takes no external groups, because rollout.outside_groups is 0: set rollout.outside_groups" in said
    unknown = served_plane.client.http.post("/runs/nobodys/groups", json={})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "run_not_served")
    wrong = served_plane.client.http.post(GROUPS, json={"size": 0})
    assert (wrong.status_code, "size" in wrong.text) == (400, True)


def test_held_out_tasks_are_worked_on_from_outside(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(**OUTSIDE)
    served_plane.connect(planes.answering(renderer, "one"))
    held_out = {"split": "holdout", "size": 5}
    assert served_plane.client.http.post(GROUPS, json=held_out).status_code == 429
    served_plane.post("/runs/run/evaluations/0", {"num_tasks": 3})
    tasks = served_plane.client.post(GROUPS, held_out)
    assert (tasks["group"], [session["member"] for session in tasks["sessions"]]) == (0, [0, 1, 2])
    for session in tasks["sessions"]:
        use(session)
        finish(served_plane, session, reward=float(session["member"]))
    assert served_plane.get("/runs/run/evaluations/0")["done"]
    assert served_plane.post("/runs/run/evaluations/0/seal", {"attempt": 1})["reward_mean"] == 1.0
