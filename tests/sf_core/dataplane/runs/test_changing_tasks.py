"""Sessions of one group that work on different tasks end the run with the function to blame."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.client import DataplaneClient
from tests.bench.dataplane.planes import ServedPlane, say

SOURCE = "my_agent:tasks (my_agent.py:5)"
Tell = Callable[[ServedPlane, dict[str, Any], str], None]


def serve(plane: ServedPlane, renderer: Renderer, attempt: int = 1, **spec: Any) -> None:
    plane.register(**{"tasks": SOURCE, "group_size": 2, "groups_per_batch": 2, "attempt": attempt} | spec)
    plane.connect(lambda prompt, seed: say(renderer, "hello"), f"r{attempt}", attempt=attempt)


def begin(plane: ServedPlane, claim: dict[str, Any], task_id: str) -> None:
    """As a runner does whose agent has begun."""
    named = {claim["session_id"]: {"task_id": task_id, "environment": "e"}}
    plane.post("/runs/run/claim", {"runner": "a0", "max": 0, "tasks": named})


def end(plane: ServedPlane, claim: dict[str, Any], task_id: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    path = f"/sessions/{claim['session_id']}/v1/chat/completions"
    assert plane.http.post(path, json=body, headers=plane.agent_headers(path)).status_code == 200
    report = {"status": "finished", "reward": 1.0, "task_id": task_id, "environment": "e"}
    plane.post(f"/sessions/{claim['session_id']}/finish", report)


def wait(plane: ServedPlane) -> None:
    DataplaneClient(plane.url, "run", plane.key).wait_for_batch(0, timeout_s=0.1, absence_timeout_s=60)


@pytest.mark.parametrize("first", [begin, end])
@pytest.mark.parametrize("second", [begin, end])
def test_the_wait_for_the_batch_ends_with_the_function_to_blame(
    served_plane: ServedPlane, renderer: Renderer, first: Tell, second: Tell
) -> None:
    serve(served_plane, renderer)
    one, other, *_ = served_plane.claim(4)
    first(served_plane, one, "t-7")
    second(served_plane, other, "t-3")

    told = (
        f"batch 0: {SOURCE} gave different tasks for equal arguments: sessions of group 0 got "
        "'t-3' of 'e' and 't-7' of 'e'. Equal arguments must give equal tasks, in every process"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(told)}$"):
        wait(served_plane)
    assert served_plane.get("/runs/run")["counters"]["rejected_groups.task_changed"] == 2
    assert served_plane.claim(4) == []


def test_a_later_attempt_goes_on_with_groups_of_its_own(
    served_plane: ServedPlane, renderer: Renderer
) -> None:
    serve(served_plane, renderer)
    one, other, third, _ = served_plane.claim(4)
    end(served_plane, third, "t-1")
    begin(served_plane, one, "t-7")
    begin(served_plane, other, "t-3")

    serve(served_plane, renderer, attempt=2)
    claims = served_plane.claim(4, runner="a1")
    for claim in claims:
        end(served_plane, claim, claim["session_id"].split(".")[1])

    wait(served_plane)
    sealed = served_plane.post("/runs/run/batches/0/seal", {"attempt": 2})
    assert (sealed["groups"], sealed["rejected"]) == ([2, 3], {"0": "task_changed", "1": "task_changed"})


def test_each_held_out_session_has_a_task_of_its_own(served_plane: ServedPlane, renderer: Renderer) -> None:
    serve(served_plane, renderer)
    served_plane.post("/runs/run/evaluations/0", {"num_tasks": 2})
    for claim in served_plane.claim(2):
        begin(served_plane, claim, claim["session_id"])
        end(served_plane, claim, claim["session_id"])

    DataplaneClient(served_plane.url, "run", served_plane.key).wait_for_evaluation(
        0, timeout_s=60, absence_timeout_s=60
    )


def test_external_agents_name_their_tasks_as_they_like(served_plane: ServedPlane, renderer: Renderer) -> None:
    serve(served_plane, renderer, outside_groups=1, groups_per_batch=1)
    declared = served_plane.client.post("/runs/run/groups", {"size": 2})["sessions"]
    for session in declared:
        end(served_plane, session, session["session_id"])

    assert served_plane.get("/runs/run/batches/0")["fault"] == ""
    assert served_plane.get("/runs/run/batches/0")["accepted"] == 1
