"""Sessions of one group that work on different tasks end the run with the function to blame."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.client import DataplaneClient
from tests.sf_core.dataplane.stand import Server, say

SOURCE = "my_agent:tasks (my_agent.py:5)"
Tell = Callable[[Server, dict[str, Any], str], None]


def serve(server: Server, renderer: Renderer, attempt: int = 1, **spec: Any) -> None:
    server.register(**{"tasks": SOURCE, "group_size": 2, "groups_per_batch": 2, "attempt": attempt} | spec)
    server.connect(lambda prompt, seed: say(renderer, "hello"), f"r{attempt}", attempt=attempt)


def begin(server: Server, claim: dict[str, Any], task_id: str) -> None:
    """As a runner does whose agent has begun."""
    named = {claim["session_id"]: {"task_id": task_id, "environment": "e"}}
    server.post("/runs/run/claim", {"runner": "a0", "max": 0, "tasks": named})


def end(server: Server, claim: dict[str, Any], task_id: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    path = f"/sessions/{claim['session_id']}/v1/chat/completions"
    assert server.http.post(path, json=body).status_code == 200
    report = {"status": "finished", "reward": 1.0, "task_id": task_id, "environment": "e"}
    server.post(f"/sessions/{claim['session_id']}/finish", report)


def wait(server: Server) -> None:
    DataplaneClient(server.url, "run").wait_for_batch(0, timeout_s=0.1, absence_timeout_s=60)


@pytest.mark.parametrize("first", [begin, end])
@pytest.mark.parametrize("second", [begin, end])
def test_the_wait_for_the_batch_ends_with_the_function_to_blame(
    server: Server, renderer: Renderer, first: Tell, second: Tell
) -> None:
    serve(server, renderer)
    one, other, *_ = server.claim(4)
    first(server, one, "t-7")
    second(server, other, "t-3")

    told = (
        f"batch 0: {SOURCE} changes between two calls: sessions of group 0, which work on one task, got "
        "'t-3' of 'e' and 't-7' of 'e'. Equal arguments must give equal tasks, in every process"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(told)}$"):
        wait(server)
    assert server.get("/runs/run")["counters"]["rejected_groups.task_changed"] == 2
    assert server.claim(4) == []


def test_a_later_attempt_goes_on_with_groups_of_its_own(server: Server, renderer: Renderer) -> None:
    serve(server, renderer)
    one, other, third, _ = server.claim(4)
    end(server, third, "t-1")
    begin(server, one, "t-7")
    begin(server, other, "t-3")

    serve(server, renderer, attempt=2)
    claims = server.claim(4, runner="a1")
    for claim in claims:
        end(server, claim, claim["session_id"].split(".")[1])

    wait(server)
    sealed = server.post("/runs/run/batches/0/seal", {"attempt": 2})
    assert (sealed["groups"], sealed["rejected"]) == ([2, 3], {"0": "task_changed", "1": "task_changed"})


def test_each_held_out_session_has_a_task_of_its_own(server: Server, renderer: Renderer) -> None:
    serve(server, renderer)
    server.post("/runs/run/evaluations/0", {"num_tasks": 2})
    for claim in server.claim(2):
        begin(server, claim, claim["session_id"])
        end(server, claim, claim["session_id"])

    DataplaneClient(server.url, "run").wait_for_evaluation(0, timeout_s=60, absence_timeout_s=60)


def test_agents_outside_name_their_tasks_as_they_like(server: Server, renderer: Renderer) -> None:
    serve(server, renderer, outside_groups=1, groups_per_batch=1)
    declared = server.post("/runs/run/groups", {"size": 2})["sessions"]
    for session in declared:
        end(server, session, session["session_id"])

    assert server.get("/runs/run/batches/0")["fault"] == ""
    assert server.get("/runs/run/batches/0")["accepted"] == 1
