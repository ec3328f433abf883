"""Invariants 1 to 4 over real HTTP: whatever happens to engines, agents see whole answers and the record is
exact."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.turns.sampling import derive_seed
from sf_core.engines.scripted import scripted_logprob
from storage.tables.schema import Trajectory
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench import waits
from tests.bench.dataplane import planes
from tests.bench.properties import examples

BUDGET = 48
STOP = 1  # <|im_end|> of the test tokenizer


def script(prompt_ids: list[int], seed: int) -> list[int]:
    """Up to 60 random tokens, so that some answers end by themselves and some by their budget."""
    random = np.random.default_rng([seed, len(prompt_ids)])
    return [*random.integers(2, 300, random.integers(0, 60)).tolist(), STOP]


def converse(
    plane: planes.ServedPlane, claim: dict[str, Any], num_turns: int, streamed: bool
) -> list[dict[str, Any]]:
    """An agent that asks, reads the whole answer and goes on. Returns usage and text of each turn."""
    path = f"/sessions/{claim['session_id']}/v1/chat/completions"
    headers = plane.agent_headers(path)
    messages: list[dict[str, Any]] = []
    turns = []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"{turn}?"})
        body = {"model": "policy", "messages": messages, "max_tokens": BUDGET}
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            response = httpx.post(plane.url + path, json=body, headers=headers, timeout=waits.patience())
            events = [httpx_json(line) for line in response.text.split("\n\n") if line.startswith("data: {")]
            assert "error" not in events[-1], events[-1]
            choices = [event["choices"][0] for event in events if event["choices"]]
            answer = {
                "text": "".join(choice["delta"].get("content") or "" for choice in choices),
                "reason": choices[-1]["finish_reason"],
                "tokens": events[-1]["usage"]["completion_tokens"],
            }
        else:
            response = httpx.post(plane.url + path, json=body, headers=headers, timeout=waits.patience())
            assert response.status_code == 200, response.text
            [choice] = response.json()["choices"]
            answer = {
                "text": choice["message"]["content"],
                "reason": choice["finish_reason"],
                "tokens": response.json()["usage"]["completion_tokens"],
            }
        messages.append({"role": "assistant", "content": answer["text"]})
        turns.append(answer)
    return turns


def httpx_json(line: str) -> Any:
    return httpx.Response(200, content=line.removeprefix("data: ")).json()


class Disturbances:
    """What a cluster does to a run, one step at a time; after each step there are two engines."""

    def __init__(self, plane: planes.ServedPlane, run_id: str) -> None:
        self.server = plane
        self.run_id = run_id
        self.version = 0
        self.names = itertools.count()
        self.killed: planes.RecordingEngine | None = None
        self.leases = [self.connect(), self.connect()]

    def connect(self) -> str:
        lease = f"{self.run_id}-{next(self.names)}"
        self.server.connect(script, lease=lease, run_id=self.run_id)
        return lease

    def revoke(self) -> None:
        lease = self.leases.pop(0)
        self.server.post(f"/runs/{self.run_id}/leases/{lease}/revoke")
        assert self.server.engines[lease].num_requests == 0
        self.leases.append(self.connect())

    def kill(self) -> None:
        # a request that may have ended an engine is refused if the next one ends by chance, too
        if self.killed is not None:
            waits.wait_until(lambda: all(map(self._is_cleared, self.killed.without_token)))
        engine = self.server.engines[self.leases[0]]
        engine.killed = True
        waits.wait_until(lambda: engine.died_at < math.inf or not engine.num_requests)
        engine.killed = False
        if engine.died_at == math.inf:
            return self.revoke()  # at rest it takes no step in which it could die
        self.killed = engine
        del self.leases[0]
        self.leases.append(self.connect())

    def _is_cleared(self, request_id: str) -> bool:
        """Whether a request has got a token since the last kill."""
        times = [engine.proven.get(request_id, 0.0) for engine in self.server.engines.values()]
        return max(times) > self.killed.died_at

    def update(self) -> None:
        self.version += 1
        self.server.post(f"/runs/{self.run_id}/weights", {"version": self.version, "uri": "w"})

    def freeze(self) -> None:
        self._pause({"mode": "freeze"})

    def evacuate(self) -> None:
        self._pause({"mode": "evacuate"})

    def evacuate_one(self) -> None:
        self._pause({"mode": "evacuate", "engine": self.leases[0]})

    def _pause(self, what: dict[str, Any]) -> None:
        self.server.post(f"/runs/{self.run_id}/pause", what)
        self.server.post(f"/runs/{self.run_id}/resume", {"engine": what.get("engine")})

    def drain(self) -> None:
        self.server.post(f"/runs/{self.run_id}/engines/{self.leases.pop(0)}/drain")
        self.leases.append(self.connect())


@pytest.fixture(scope="module")
def shared_plane(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Iterator[planes.ServedPlane]:
    with planes.running_app() as url, planes.operator_client(url) as http:
        yield planes.ServedPlane(url, http, tmp_path_factory.mktemp("runs"), model_dir)


run_numbers = itertools.count()

DISTURBANCES = ["revoke", "kill", "update", "freeze", "evacuate", "evacuate_one", "drain"]


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    disturbances=st.lists(st.sampled_from(DISTURBANCES), max_size=6),
    conversations=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=2, max_size=2),
)
def test_agents_see_whole_answers_and_the_record_is_exact(
    shared_plane: planes.ServedPlane,
    renderer: Renderer,
    disturbances: list[str],
    conversations: list[tuple[int, bool]],
) -> None:
    run_id = f"run{next(run_numbers)}"
    shared_plane.asked.clear()
    shared_plane.register(
        run_id=run_id,
        run_dir=str(shared_plane.run_dir / run_id),
        groups_per_batch=1,
        max_tokens=BUDGET,
        temperature=1.0,
        lag_bound=99,
    )
    cluster = Disturbances(shared_plane, run_id)
    claims = shared_plane.claim(2, run_id=run_id)
    answers: dict[str, list[dict[str, Any]]] = {}

    def agent(claim: dict[str, Any], num_turns: int, streamed: bool) -> None:
        answers[claim["session_id"]] = converse(shared_plane, claim, num_turns, streamed)

    agents = [
        threading.Thread(target=agent, args=(claim, *conversation))
        for claim, conversation in zip(claims, conversations, strict=True)
    ]
    for thread in agents:
        thread.start()
    for disturbance in disturbances:
        getattr(cluster, disturbance)()
    for thread in agents:
        waits.join(thread)
    for claim in claims:
        report = {"status": "finished", "reward": 1.0, "task_id": "t", "environment": "e"}
        shared_plane.post(f"/sessions/{claim['session_id']}/finish", report)
    sealed = shared_plane.post(f"/runs/{run_id}/batches/0/seal", {"attempt": 1})
    shared_plane.post(f"/runs/{run_id}/release")
    rows = to_rows(read_trajectories(str(Path(shared_plane.run_dir, run_id, sealed["files"][0]["uri"]))))

    assert [row.session_id for row in rows] == [claim["session_id"] for claim in claims]
    assert shared_plane.get(f"/runs/{run_id}")["counters"].get("abandoned_turns", 0) == 0
    for row, claim in zip(rows, claims, strict=True):
        turns = answers[claim["session_id"]]
        check_row(row, claim, turns, renderer)
        assert sum(int(row.loss_mask.sum()) for row in [row]) == sum(turn["tokens"] for turn in turns)
    check_requests(shared_plane, rows)


def check_row(
    row: Trajectory, claim: dict[str, Any], answers: list[dict[str, Any]], renderer: Renderer
) -> None:
    ids = row.token_ids.tolist()
    spans = [span for span in row.turns if span.role == "assistant"]
    for index, (span, answer) in enumerate(zip(spans, answers, strict=True)):
        seed = derive_seed(7, ("train", claim["group"], claim["member"]), index, 0)
        expected = script(ids[: span.start], seed)[:BUDGET]
        assert ids[span.start : span.end] == expected
        assert answer["text"] == renderer.decode([token for token in expected if token != STOP])
        assert answer["tokens"] == len(expected)
        assert answer["reason"] == span.finish_reason == ("stop" if expected[-1] == STOP else "length")
        assert row.loss_mask[span.start : span.end].all()
        versions = row.policy_versions[span.start : span.end].tolist()
        assert row.logprobs[span.start : span.end].tolist() == [
            scripted_logprob(token, i, version)
            for i, (token, version) in enumerate(zip(expected, versions, strict=True))
        ]
    sampled = row.policy_versions[row.loss_mask]
    assert (np.diff(sampled) >= 0).all()


def check_requests(plane: planes.ServedPlane, rows: list[Trajectory]) -> None:
    """Every engine was asked to continue exactly what is recorded."""
    recorded = {
        tuple(row.token_ids[: span.start + position].tolist())
        for row in rows
        for span in row.turns
        if span.role == "assistant"
        for position in range(span.end - span.start)
    }
    for request in plane.asked:
        assert tuple(request.prompt_ids) in recorded
        assert request.position + request.max_tokens == BUDGET


def test_a_next_turn_goes_where_its_branch_is_cached(shared_plane: planes.ServedPlane) -> None:
    run_id = f"run{next(run_numbers)}"
    shared_plane.register(run_id=run_id, run_dir=str(shared_plane.run_dir / run_id))
    first, second = Disturbances(shared_plane, run_id).leases
    known, new = shared_plane.claim(2, run_id=run_id)

    def ask(claim: dict[str, Any], messages: list[dict[str, Any]]) -> str:
        """Ask and append the answer; returns the engine that gave it."""
        before = shared_plane.get(f"/runs/{run_id}")["engines"]
        body = {"model": "policy", "messages": messages}
        answer = shared_plane.post(f"/sessions/{claim['session_id']}/v1/chat/completions", body, claim["key"])
        messages.append(answer["choices"][0]["message"])
        after = shared_plane.get(f"/runs/{run_id}")["engines"]
        [lease] = [b["id"] for b, a in zip(before, after, strict=True) if a["tokens"] > b["tokens"]]
        return str(lease)

    conversation: list[dict[str, Any]] = [{"role": "user", "content": "0?"}]
    shared_plane.post(f"/runs/{run_id}/pause", {"engine": first})
    assert ask(known, conversation) == second
    shared_plane.post(f"/runs/{run_id}/resume", {"engine": first})
    for turn in range(1, 4):
        conversation.append({"role": "user", "content": f"{turn}?"})
        assert ask(known, conversation) == second
    # idle engines are taken in order by whoever is known to none
    assert ask(new, [{"role": "user", "content": "0?"}]) == first
    shared_plane.post(f"/runs/{run_id}/release")


def test_a_full_line_and_a_long_wait_are_refused_with_a_time_to_come_back(
    shared_plane: planes.ServedPlane,
) -> None:
    run_id = f"run{next(run_numbers)}"
    shared_plane.register(
        run_id=run_id, run_dir=str(shared_plane.run_dir / run_id), max_waiting=1, request_patience_s=0.5
    )
    [claim] = shared_plane.claim(1, run_id=run_id)
    path = f"/sessions/{claim['session_id']}/v1/chat/completions"
    headers = shared_plane.agent_headers(path)
    body = {"model": "policy", "messages": [{"role": "user", "content": "0?"}]}
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(shared_plane.http.post(path, json=body, headers=headers))
    )
    waiting.start()
    waits.wait_until(lambda: shared_plane.get(f"/runs/{run_id}")["requests_waiting"] == 1)
    refused = shared_plane.http.post(path, json=body, headers=headers)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    waits.join(waiting)
    assert (answers[0].status_code, answers[0].headers["retry-after"]) == (503, "5")
    assert "no engine is connected" in answers[0].json()["error"]["message"]
    shared_plane.post(f"/runs/{run_id}/release")
