"""Over HTTP: sessions that are cut, rewards without the part that counts, runs of which nothing counts."""

from __future__ import annotations

from typing import Any

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.client import DataplaneClient
from tests.bench.dataplane import planes, served_runs
from tests.bench.dataplane.figures import figures

BATCH = "/runs/run/batches/0"


def register(plane: planes.ServedPlane, renderer: Renderer, **rules: Any) -> None:
    plane.register(**{"groups_per_batch": 1, "group_size": 2, "lag_bound": 0} | rules)
    plane.connect(lambda prompt, seed: planes.say(renderer, "answer"))


def end(plane: planes.ServedPlane, session_id: str, reward: float = 1.0, **parts: float) -> dict[str, Any]:
    report = {"session_id": session_id, "status": "finished", "reward": reward, "reward_parts": parts}
    return plane.post("/runs/run/finished", {"sessions": [report]})


def play(plane: planes.ServedPlane, runner: str = "a0") -> None:
    """Have a group end with equal rewards."""
    for name in served_runs.sessions(served_runs.claim(plane, runner, 2)):
        served_runs.ask(plane, name)
        end(plane, name)


# --- runs of which nothing counts


def test_a_flow_ends_with_the_counts_if_all_groups_of_ten_batches_were_dropped(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    register(served_plane, renderer, gate="varied")
    for _ in range(9):
        play(served_plane)
    status = served_plane.get(BATCH)
    dropped = "9 dropped since the last batch: equal_rewards 9"
    assert (status["waiting_for"], status["fault"]) == (f"1 of 1 groups; 0 are in flight; {dropped}", "")
    play(served_plane)
    client = DataplaneClient(served_plane.url, "run", served_plane.key)
    with pytest.raises(RuntimeError) as ended:
        client.wait_for_batch(0, timeout_s=60, absence_timeout_s=60)
    assert str(ended.value) == (
        "batch 0: the last 10 groups were all dropped (equal_rewards 10), so no batch can be completed: "
        "rollout.gate varied rejects every group; use tasks that the policy sometimes solves, correct "
        "rollout.success, or set rollout.gate to all"
    )
    assert served_runs.sessions(served_runs.claim(served_plane, "a0", 2)) == [], (
        "nothing is sampled for a run that ends"
    )
    # another attempt, in which it is mended, goes on
    served_plane.register(groups_per_batch=1, group_size=2, lag_bound=0, attempt=2)
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "answer"), lease="r1", attempt=2)
    play(served_plane, "a1")
    assert served_plane.get(BATCH)["ready"]
    sealed = served_plane.post(f"{BATCH}/seal", {"attempt": 2})
    assert sealed["groups"] == [10] and len(sealed["rejected"]) == 10
    assert sealed.keys().isdisjoint({"outcomes", "right", "length_cut"}), "it does not choose any more"


# --- rewards without the part


def test_a_reward_without_the_part_fails_its_session_with_the_parts_that_it_has(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    register(served_plane, renderer, success={"part": "right"}, session_attempts=1)
    first, second = served_runs.sessions(served_runs.claim(served_plane, "a0", 2))
    for name in (first, second):
        served_runs.ask(served_plane, name)
    refusal = (
        "The reward has no part 'right' (rollout.success.part); its parts are 'form', 'style': set "
        "rollout.success.part to one of these, or return the missing part."
    )
    assert end(served_plane, first, style=1.0, form=0.0) == {"finished": [], "refused": {first: refusal}}
    status = served_plane.get("/runs/run")
    assert status["last_error"] == refusal
    assert status["counters"]["failures.reward_error"] == 1
    assert status["counters"]["rejected_groups.reward_error"] == 1

    [third, _] = served_runs.sessions(served_runs.claim(served_plane, "a0", 2))
    served_runs.ask(served_plane, third)
    refusal = (
        "The reward has no part 'right' (rollout.success.part); it has no parts: return a "
        "mapping of named parts, or remove rollout.success.part."
    )
    assert end(served_plane, third)["refused"] == {third: refusal}
    assert served_plane.get(BATCH)["failures_in_a_row"] == 2, "so that the flow ends with it"


def test_held_out_sessions_need_no_part_and_failed_ones_are_wrong(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    rules = {"success": {"part": "right", "at_least": -1.0}, "gate": "varied", "failed_reward": 1.0}
    register(served_plane, renderer, **rules, on_failure={"agent_error": "zero"})
    served_plane.post("/runs/run/evaluations/0", {"num_tasks": 1})
    [held_out] = served_runs.sessions(served_runs.claim(served_plane, "a0", 1))
    served_runs.ask(served_plane, held_out)
    assert end(served_plane, held_out, 0.5)["finished"] == [held_out]
    assert served_plane.post("/runs/run/evaluations/0/seal", {"attempt": 1})["reward_mean"] == 0.5

    failing, right = served_runs.sessions(served_runs.claim(served_plane, "a0", 2))
    for name in (failing, right):
        served_runs.ask(served_plane, name)
    served_plane.post(f"/sessions/{failing}/finish", {"status": "failed", "error": "KeyError: x"})
    end(served_plane, right, right=0.5)
    # a failed session has no parts: 0, which is at least -1
    assert served_plane.get(BATCH)["waiting_for"].endswith(
        "1 dropped since the last batch: one_outcome 1; the last failed session: KeyError: x"
    )


# --- sessions that are cut


def test_a_cut_session_has_ended_for_its_agent_and_its_runner(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    register(served_plane, renderer, spare_sessions=1)
    names = served_runs.sessions(served_runs.claim(served_plane, "a0", 3))
    for name in names:
        served_runs.ask(served_plane, name)
    for name in names[1:]:
        end(served_plane, name)
    cut = names[0]
    assert served_runs.claim(served_plane, "a0", 0, "agent", cut)["ended"] == [cut], "its runner stops it"
    ended = names[1]
    asked = {"model": "policy", "messages": []}
    late = [
        served_plane.http.post(
            f"/sessions/{name}/v1/chat/completions",
            json=asked,
            headers={"Authorization": f"Bearer {served_plane.agent_key(name)}"},
        )
        for name in (cut, ended)
    ]
    assert [response.status_code for response in late] == [404, 404]
    assert late[0].text.replace(cut, ended) == late[1].text
    # no report has ended it, so none is repeated and none contradicts another
    refused = served_plane.http.post(f"/sessions/{cut}/finish", json={"status": "finished", "reward": 1.0})
    assert (refused.status_code, "is unknown or has ended" in refused.text) == (404, True)
    assert end(served_plane, cut) == {"finished": [], "refused": {}}
    assert served_plane.get("/runs/run")["counters"]["late_reports"] == 2
    assert end(served_plane, ended) == {"finished": [ended], "refused": {}}
    refusal = f"Session {ended} has ended by another report: this report changes nothing."
    assert end(served_plane, ended, 0.0) == {"finished": [], "refused": {ended: refusal}}
    assert served_plane.get("/runs/run")["counters"]["finished_sessions"] == 2

    tokens = len(planes.say(renderer, "answer"))
    sealed = served_plane.post(f"{BATCH}/seal", {"attempt": 1})
    assert sealed["sessions"] == 2
    figures_of_lengths = {name: sealed[name] for name in ("length_kept", "length_cut", "cut_sessions")}
    assert figures_of_lengths == {"length_kept": tokens, "length_cut": tokens, "cut_sessions": 1}
    assert (sealed["right"], sealed["mixed"], sealed["wrong"]) == (1, 0, 0)
    seen = figures(served_plane)
    assert seen["sf_sessions_total", "cut", "run"] == 1
    assert seen["sf_sessions_total", "finished", "run"] == 2
    assert seen["sf_cut_tokens_total", "run"] == tokens
    kinds = {kind: seen["sf_judged_groups_total", kind, "run"] for kind in ("right", "mixed", "wrong")}
    assert kinds == {"right": 1, "mixed": 0, "wrong": 0}


def test_a_cut_session_that_waits_for_its_score_is_scored_by_nobody(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    register(served_plane, renderer, spare_sessions=1)
    served_runs.claim(served_plane, "s0", 0, "reward")
    names = served_runs.answer_all(served_plane, served_runs.claim(served_plane, "a0", 3))
    given = served_runs.sessions(served_runs.claim(served_plane, "s0", 2, "reward"))
    assert given == names[:2]
    served_runs.score(served_plane, given)
    assert served_plane.get("/runs/run")["work"]["reward"] == 0
    assert served_runs.sessions(served_runs.claim(served_plane, "s0", 9, "reward")) == []
    assert served_plane.get(BATCH)["ready"]


def test_a_cut_session_that_is_being_scored_is_stopped(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    register(served_plane, renderer, spare_sessions=1)
    served_runs.claim(served_plane, "s0", 0, "reward")
    names = served_runs.answer_all(served_plane, served_runs.claim(served_plane, "a0", 3))
    assert served_runs.sessions(served_runs.claim(served_plane, "s0", 9, "reward")) == names
    served_runs.score(served_plane, names[:2])
    assert served_runs.claim(served_plane, "s0", 0, "reward", names[2])["ended"] == [names[2]]
    assert end(served_plane, names[2]) == {"finished": [], "refused": {}}


def test_groups_whose_task_was_taken_again_are_counted(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    register(served_plane, renderer, groups_per_batch=2, curriculum={"pool": 1})
    served_runs.claim(served_plane, "a0", 4)
    assert figures(served_plane)["sf_repeated_tasks_total", "run"] == 1


def test_claims_name_the_task_that_was_picked(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    stages = [{"shares": {"sums": 1.0}}]
    register(served_plane, renderer, groups_per_batch=2, curriculum={"pool": 99, "stages": stages})
    served_plane.post("/runs/run/evaluations/0", {"num_tasks": 2})
    given = served_runs.claim(served_plane, "a0", 6)["sessions"]
    held_out = given[:2]
    trained = given[2:]
    assert [(each["source"], each["task_index"]) for each in held_out] == [("", 0), ("", 1)]
    first, second = [{(each["source"], each["task_index"]) for each in trained[i : i + 2]} for i in (0, 2)]
    assert len(first) == len(second) == 1 and first != second, "one task by group"
    assert first | second <= {("sums", number) for number in range(99)}
    assert not (first | second) & {("sums", 0), ("sums", 1)}, "its number is not that of its group"
    # its answer comes with the same task
    served_runs.claim(served_plane, "s0", 0, "reward")
    served_runs.answer_all(served_plane, {"sessions": trained[:1]})
    [again] = served_runs.claim(served_plane, "s0", 9, "reward")["sessions"]
    assert {(again["source"], again["task_index"])} == first
