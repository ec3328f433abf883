"""What agents, runners and flows see of a journal that cannot be written, and what it holds afterwards."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sf_core.dataplane.chat.renderer import Renderer
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench import dataplane
from tests.bench.dataplane.restarts import Restarts
from tests.bench.waits import wait_until

TEXT = "the answer is 42."
BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
OTHER = {"model": "policy", "messages": [{"role": "user", "content": "something else"}]}


def open_session(restarts: Restarts, renderer: Renderer) -> dict[str, Any]:
    """First session of a run whose engine always answers TEXT."""
    restarts.plane.register(group_size=1, groups_per_batch=1)
    restarts.plane.connect(lambda prompt, seed: dataplane.planes.say(renderer, TEXT))
    return restarts.plane.claim()[0]


def path_of(claim: dict[str, Any], route: str = "chat/completions") -> str:
    return f"/sessions/{claim['session_id']}/v1/{route}"


def ask_until_answered(
    plane: dataplane.planes.ServedPlane, path: str, body: dict[str, Any], **options: Any
) -> httpx.Response:
    responses: list[httpx.Response] = []

    def answered() -> bool:
        responses.append(plane.http.post(path, json=body, **options))
        return responses[-1].status_code != 503

    wait_until(answered)
    assert responses[-1].status_code == 200, responses[-1].text
    return responses[-1]


def check_the_record(restarts: Restarts, renderer: Renderer, claim: dict[str, Any]) -> None:
    """Check after a kill that the session has one turn, with each of its tokens once."""
    restarts.restart()
    dataplane.planes.finish(restarts.plane, claim)
    assert trained_tokens(restarts) == dataplane.planes.say(renderer, TEXT)


def trained_tokens(restarts: Restarts) -> list[int]:
    """Seal the first batch; returns its trained tokens."""
    sealed = restarts.plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    rows = to_rows(read_trajectories(str(Path(restarts.folder, "run", sealed["files"][0]["uri"]))))
    return [token for row in rows for token in row.token_ids[row.loss_mask].tolist()]


def test_a_turn_that_cannot_be_recorded_is_refused_and_joined_when_it_is_asked_again(
    restarts: Restarts, renderer: Renderer
) -> None:
    plane = restarts.plane
    claim = open_session(restarts, renderer)
    with dataplane.full_disk.full_disk():
        refused = plane.http.post(path_of(claim), json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "journal_unwritable")
        assert f"cannot write its journal in {restarts.journal.parent}" in error["message"]
        assert (
            plane.http.post(path_of(claim), json=BODY, headers=dataplane.served_runs.RETRY).status_code == 503
        )
        assert plane.http.post(path_of(claim), json=BODY | {"stream": True}).status_code == 503
        # nothing is begun that could not be recorded
        assert plane.http.post(path_of(claim), json=OTHER).status_code == 503
        in_anthropics_words = plane.http.post(path_of(claim, "messages"), json=OTHER | {"max_tokens": 5})
        assert in_anthropics_words.status_code == 503
        assert in_anthropics_words.json()["type"] == "error"
        body = {"runner": "a0", "max": 1, "running": [claim["session_id"]]}
        given = plane.http.post("/runs/run/claim", json=body)
        assert given.status_code == 503 or given.json()["sessions"] == []
        assert set(reasons(plane)) == {"File too large"}
    answer = ask_until_answered(plane, path_of(claim), BODY, headers=dataplane.served_runs.RETRY).json()
    assert answer["id"].endswith(".0.0")
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert len(plane.asked) == 1
    wait_until(lambda: reasons(plane) == [])
    check_the_record(restarts, renderer, claim)


def reasons(plane: dataplane.planes.ServedPlane) -> list[str]:
    """Reasons why journals cannot be written, from /metrics."""
    lines = plane.http.get("/metrics").text.splitlines()
    return re.findall(r'sf_journal_unwritable{.*reason="(.*?)".*} 1.0', "\n".join(lines))


def test_a_stream_breaks_off_with_the_reason_and_goes_on_when_it_is_asked_again(
    restarts: Restarts, renderer: Renderer
) -> None:
    plane = restarts.plane
    claim = open_session(restarts, renderer)
    engine = plane.engines["r0"]
    engine.steps_left = 3
    streamed = BODY | {"stream": True}
    with plane.http.stream("POST", path_of(claim), json=streamed) as response:
        events = events_of(response)
        seen = text_of(next(events))
        while not seen:
            seen = text_of(next(events))
        with dataplane.full_disk.full_disk():
            engine.steps_left = None
            *rest, last = events
            assert last["error"]["code"] == "journal_unwritable"
            seen += "".join(map(text_of, rest))
    answer = ask_until_answered(plane, path_of(claim), streamed)
    text = "".join(map(text_of, events_of(answer)))
    assert (text, text.startswith(seen), len(seen) < len(text)) == (TEXT, True, True)
    assert len(plane.asked) == 1
    check_the_record(restarts, renderer, claim)


def events_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def text_of(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{"delta": {}}]
    return choices[0]["delta"].get("content") or ""


def test_a_session_that_ends_on_a_full_disk_is_finished_when_there_is_room(
    restarts: Restarts, renderer: Renderer
) -> None:
    plane = restarts.plane
    claim = open_session(restarts, renderer)
    opened = plane.client.post("/sessions", {"run_id": "run"})
    for session in (claim, opened):
        assert plane.http.post(path_of(session), json=BODY).status_code == 200
    end: dict[str, Any] = {"status": "finished", "reward": 1.0}
    report = {"session_id": claim["session_id"]} | end
    with dataplane.full_disk.full_disk():
        for _ in range(2):
            # it is over, and is not said to be until that is recorded
            ended = plane.http.post(f"/sessions/{opened['session_id']}/finish", json=end)
            assert ended.status_code == 503
        # an answer that its agent never gets is not trained
        assert plane.http.post(path_of(claim), json=OTHER).status_code == 503
        for _ in range(2):
            assert plane.http.post("/runs/run/finished", json={"sessions": [report]}).status_code == 503
        assert plane.http.post("/runs/run/evaluations/0", json={"num_tasks": 1}).status_code == 503
        batch = plane.get("/runs/run/batches/0")
        assert not batch["ready"]
        assert "the journal cannot be written" in batch["waiting_for"]
    # the runner's next try tells that nothing is left to report
    ask_until_answered(plane, "/runs/run/finished", {"sessions": [report]})
    wait_until(lambda: bool(plane.get("/runs/run/batches/0")["ready"]))
    restarts.restart()
    assert trained_tokens(restarts) == dataplane.planes.say(renderer, TEXT)


def test_a_run_is_registered_once_there_is_room(restarts: Restarts) -> None:
    with dataplane.full_disk.full_disk():
        with pytest.raises(AssertionError, match="cannot write its journal"):
            restarts.plane.register()
        assert restarts.plane.http.get("/runs/run").status_code == 404
    restarts.plane.register()
    assert restarts.plane.claim() != []


@pytest.mark.nightly
def test_a_disk_that_is_full_now_and_then_costs_agents_nothing(
    restarts: Restarts, renderer: Renderer
) -> None:
    def fill(moments: random.Random) -> None:
        with dataplane.full_disk.full_disk():
            threading.Event().wait(moments.uniform(0.1, 0.5))

    dataplane.served_runs.agents_see_whole_answers(restarts, renderer, 0, fill)
