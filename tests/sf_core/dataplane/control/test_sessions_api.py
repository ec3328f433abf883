"""Sessions that agents open for themselves: how requests name them, and which keys allow it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai import OpenAI

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control import plane
from tests.bench import dataplane, waits
from tests.bench.refusals import check_sentence

HI: Any = [{"role": "user", "content": "hi"}]
STORED: Any = ({}, {"store": False}, {"instructions": "be brief"})
"""Options on which the form of a response's id depends."""
GOOGLES: Any = {"contents": [{"parts": [{"text": "e"}]}], "generationConfig": {"maxOutputTokens": 4}}


def ask(base_url: str, key: str = "none", messages: Any = HI, **options: Any) -> Any:
    with OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=waits.patience(), **options) as agent:
        return agent.chat.completions.create(model="policy", messages=messages)


def test_a_session_is_opened_used_looked_at_and_finished(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(dataplane.planes.answering(renderer, "one", "two"))
    opened = served_plane.client.post(
        "/sessions", {"run_id": "run", "task_id": "t7", "metadata": {"seed": 3}}
    )
    first = ask(opened["base_url"])
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    ask(opened["base_url"], messages=[*HI, answer, {"role": "user", "content": "more"}])
    ask(opened["base_url"], messages=[*HI, answer, {"role": "user", "content": "else"}])
    path = f"/sessions/{opened['session_id']}"
    served_plane.client.post(path + "/reward", {"reward": 0.5, "reward_parts": {"style": 0.5}})
    tree = served_plane.client.get(path)
    carried = {"task_id": "t7", "metadata": {"seed": 3}, "policy": "policy", "group": None, "reward": 0.5}
    assert carried.items() <= tree.items()
    assert [prompt["parent_turn"] for prompt in tree["prompts"]] == [None, 0, 0]
    assert [prompt["branch_reason"] for prompt in tree["prompts"]] == [None, None, "forked"]
    assert [message["content"] for message in tree["prompts"][1]["messages"]] == ["more"]
    assert [turn["message"]["content"] for turn in tree["turns"]] == ["one", "two", "two"]
    assert tree["turns"][0]["num_tokens"] == len(dataplane.planes.say(renderer, "one"))
    assert (tree["turns"][0]["versions"], tree["turns"][0]["finish_reason"]) == ([0, 0], "stop")
    served_plane.client.post(path + "/finish", {"status": "finished"})
    assert served_plane.client.http.get(path).status_code == 404
    with pytest.raises(openai.NotFoundError, match="is unknown or has ended"):
        ask(opened["base_url"])


def test_a_session_is_looked_at_whose_messages_hold_integers_of_any_size(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(dataplane.planes.answering(renderer, "one"))
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    arguments = {"x": 2**70}
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    called = {"role": "assistant", "content": "", "tool_calls": [made]}
    ask(opened["base_url"], messages=[*HI, called, {"role": "tool", "tool_call_id": "c", "content": "2"}])
    tree = json.loads(served_plane.client.http.get(f"/sessions/{opened['session_id']}").content)
    [call] = tree["prompts"][0]["messages"][1]["tool_calls"]
    assert call["function"]["arguments"] == arguments


def test_answers_of_every_api_are_rewarded_by_their_ids_and_forks_hold_the_rewards_of_whole_turns(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(dataplane.planes.answering(renderer, "one", "two"))
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    path = f"/sessions/{opened['session_id']}"
    ask_for = {"model": "policy", "max_tokens": 4}
    first = ask(opened["base_url"])
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    for more in ("more", "else"):
        ask(opened["base_url"], messages=[*HI, answer, {"role": "user", "content": more}])
    ids = [
        first.id,
        *(
            served_plane.client.post(f"{path}/v1/responses", {"model": "policy", "input": "b", **o})["id"]
            for o in STORED
        ),
        served_plane.client.post(f"{path}/v1/completions", {**ask_for, "prompt": "c"})["id"],
        served_plane.client.post(
            f"{path}/v1/messages", {**ask_for, "messages": [{"role": "user", "content": "d"}]}
        )["id"],
        served_plane.client.post(f"{path}/v1/models/policy:generateContent", GOOGLES)["responseId"],
    ]
    for wrong in ("chatcmpl-1", first.id.replace(".open.", ".open.0")):
        response = served_plane.client.http.post(
            path + "/reward", json={"reward": 1, "step_rewards": {wrong: 1.0}}
        )
        assert (response.status_code, "is not the id of an answer" in response.text) == (400, True)
    steps = {answer_id: float(number) for number, answer_id in enumerate(ids, 1)}
    served_plane.client.post(path + "/finish", {"status": "finished", "reward": 0.0, "step_rewards": steps})
    waits.wait_until(lambda: bool(dataplane.served_runs.stored(served_plane.run_dir / "run")))
    rows = [row for _, row in dataplane.served_runs.stored(served_plane.run_dir / "run")]
    earned = [[span.reward for span in row.turns if span.role == "assistant"] for row in rows]
    assert sorted(earned, key=str) == [[1.0, None], [1.0, None], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0]]


def test_a_session_is_named_by_url_header_or_key(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(dataplane.planes.answering(renderer, "hello"))
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    session_id = opened["session_id"]
    v1 = f"{served_plane.url}/v1"
    ask(opened["base_url"])
    ask(v1, default_headers={"X-Session-Id": session_id})
    ask(v1, key=f"session:{session_id}")
    with anthropic.Anthropic(base_url=served_plane.url, api_key=f"session:{session_id}") as agent:
        agent.messages.create(model="policy", messages=HI, max_tokens=20)
    assert len(served_plane.get(f"/sessions/{session_id}")["turns"]) == 4


def test_a_reward_given_before_counts_when_a_training_session_finishes(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(group_size=1, groups_per_batch=1)
    served_plane.connect(dataplane.planes.answering(renderer, "hello"))
    [claim] = served_plane.claim()
    path = f"/sessions/{claim['session_id']}"
    ask(f"{served_plane.url}{path}/v1", claim["key"])
    served_plane.post(path + "/reward", {"reward": 0.25})
    served_plane.post(path + "/finish", {"status": "finished"})
    assert served_plane.get("/runs/run/batches/0")["ready"]
    assert served_plane.get("/runs/run")["reward_recent"] == 0.25


def test_a_finished_session_becomes_rows_of_its_run(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(dataplane.planes.answering(renderer, "one", "two"))
    facts = {"run_id": "run", "policy": "policy", "group": "thursday", "task_id": "t7", "environment": "e"}
    paths = {}
    for reward in (0.0, 1.0):
        session = served_plane.client.post("/sessions", facts | {"metadata": {"seed": 3}})
        paths[f"/sessions/{session['session_id']}"] = reward
        ask(session["base_url"])
    assert served_plane.client.get(next(iter(paths)))["group"] == "thursday"
    for path, reward in paths.items():
        refused = served_plane.client.http.post(path + "/finish", json={"status": "finished"})
        assert (refused.status_code, "needs a reward" in refused.text) == (400, True)
        served_plane.client.post(path + "/finish", {"status": "finished", "reward": reward, "task_id": "t8"})
    given_up = served_plane.client.post("/sessions", facts)
    ask(given_up["base_url"])
    served_plane.client.post(f"/sessions/{given_up['session_id']}/finish", {"status": "failed"})
    unused = served_plane.client.post("/sessions", facts)["session_id"]
    served_plane.client.post(f"/sessions/{unused}/finish", {"status": "finished", "reward": 1.0})
    waits.wait_until(lambda: len(dataplane.served_runs.stored(served_plane.run_dir / "run")) == 2)
    rows = [
        row for version, row in dataplane.served_runs.stored(served_plane.run_dir / "run") if version == 0
    ]
    assert {f"/sessions/{row.session_id}": row.reward for row in rows} == paths
    assert {(row.group_id, row.task_id, row.environment) for row in rows} == {("thursday", "t8", "e")}
    assert [int(row.loss_mask.sum()) for row in rows] == [
        len(dataplane.planes.say(renderer, text)) for text in ("one", "two")
    ]
    assert served_plane.get("/runs/run")["counters"]["opened_sessions"] == 2


def test_a_session_for_another_policy_is_refused(served_plane: dataplane.planes.ServedPlane) -> None:
    served_plane.register()
    response = served_plane.client.http.post("/sessions", json={"run_id": "run", "policy": "another"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_opened_sessions_end_with_their_run(served_plane: dataplane.planes.ServedPlane) -> None:
    served_plane.register()
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    served_plane.register(attempt=2)
    assert served_plane.get(f"/sessions/{opened['session_id']}")["turns"] == []
    served_plane.post("/runs/run/release")
    assert served_plane.http.get(f"/sessions/{opened['session_id']}").status_code == 404


def test_an_opened_session_that_runs_too_long_ends(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(session_timeout_s=0.5)
    served_plane.connect(dataplane.planes.answering(renderer, "hello"))
    path = "/sessions/" + served_plane.client.post("/sessions", {"run_id": "run"})["session_id"]
    waits.wait_until(lambda: served_plane.http.get(path).status_code == 404)


def open_session(served_plane: dataplane.planes.ServedPlane) -> httpx.Response:
    return served_plane.client.http.post("/sessions", json={"run_id": "run"})


def check_asked_again(response: httpx.Response) -> None:
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    error = response.json()["error"]
    assert error["code"] == "run_not_served"
    assert error["message"].startswith("No run named run is served now: if its flow is starting")
    check_sentence(error["message"], "check the name of the run")


def test_a_session_of_a_run_that_is_not_served_yet_is_to_be_asked_for_again(
    served_plane: dataplane.planes.ServedPlane,
) -> None:
    check_asked_again(open_session(served_plane))
    served_plane.register()
    # no engine has come yet: its requests wait for one
    assert open_session(served_plane).status_code == 200


def test_sdks_ask_again_by_themselves_for_what_a_run_that_starts_will_answer(
    served_plane: dataplane.planes.ServedPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane, "RETRY_AFTER_S", 1)
    asked: list[int] = []

    def note(response: httpx.Response) -> None:
        asked.append(response.status_code)
        if len(asked) == 1:
            served_plane.register()

    with (
        httpx.Client(event_hooks={"response": [note]}) as http,
        OpenAI(base_url=served_plane.url, api_key="none", http_client=http) as client,
    ):
        opened = client.post("/sessions", body={"run_id": "run"}, cast_to=httpx.Response).json()
    assert (asked, opened["session_id"].startswith("run.open.")) == ([503, 200], True)


def test_a_session_of_a_run_that_stopped_waits_for_it_and_of_one_that_is_complete_does_not(
    served_plane: dataplane.planes.ServedPlane,
) -> None:
    served_plane.register(num_batches=1)
    served_plane.post("/runs/run/release")
    check_asked_again(open_session(served_plane))
    served_plane.register(num_batches=1, attempt=2, version=1, iteration=1)
    assert open_session(served_plane).status_code == 200
    served_plane.post("/runs/run/release")
    response = open_session(served_plane)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "run_over")
    assert response.json()["error"]["message"] == "Run run has ended: all 1 iterations are done."


def test_a_paused_run_opens_sessions_whose_requests_wait(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(dataplane.planes.answering(renderer, "hello"))
    served_plane.post("/runs/run/pause", {})
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, opened["base_url"])
        waits.wait_until(lambda: served_plane.get("/runs/run")["requests_waiting"] == 1)
        served_plane.post("/runs/run/resume", {})
        assert answer.result(waits.patience()).choices[0].message.content == "hello"


@pytest.fixture
def locked_plane(tmp_path: Path, model_dir: str) -> Iterator[dataplane.planes.ServedPlane]:
    with (
        dataplane.planes.running_app(key="plane") as url,
        with_two_runs(url, tmp_path, model_dir) as served_plane,
    ):
        yield served_plane


@contextlib.contextmanager
def with_two_runs(url: str, folder: Path, model_dir: str) -> Iterator[dataplane.planes.ServedPlane]:
    """A data plane with a key and two runs, `red` and `blue`, each with a key and a policy of its name."""
    headers = {"Authorization": "Bearer plane"}
    with httpx.Client(base_url=url, headers=headers, timeout=waits.patience()) as http:
        served_plane = dataplane.planes.ServedPlane(url, http, folder, model_dir)
        for name in ("red", "blue"):
            served_plane.register(
                run_id=name, run_dir=str(folder / name), served_model=name, key=f"{name}-run-key"
            )
        yield served_plane


RED = {"run_id": "red"}
REWARD = {"reward": 1.0}
ENDED = {"status": "failed"}


def status(
    plane: dataplane.planes.ServedPlane, path: str, key: str, body: dict[str, Any] | None = None
) -> int:
    """Status of the response to a GET, or to a POST if there is a body."""
    headers = {"Authorization": f"Bearer {key}"}
    if body is None:
        return plane.client.http.get(path, headers=headers).status_code
    return plane.client.http.post(path, json=body, headers=headers).status_code


def test_a_run_key_opens_the_sessions_of_its_clients_only(locked_plane: dataplane.planes.ServedPlane) -> None:
    opened = locked_plane.client.post("/sessions", RED, "red-run-key")
    path = f"/sessions/{opened['session_id']}"
    for key in ("red-run-key", "plane", "red-run-key:some-session", "plane:some-session"):
        for allowed in (path, f"{path}/v1/models"):
            assert status(locked_plane, allowed, key) == 200
        assert status(locked_plane, f"{path}/reward", key, REWARD) == 200
    for key in ("blue-run-key", "wrong", "red-run-ke", "wrong:red-run-key"):
        for refused in (path, f"{path}/v1/models"):
            assert status(locked_plane, refused, key) == 401
        for refused, body in ((f"{path}/reward", REWARD), (f"{path}/finish", ENDED)):
            assert status(locked_plane, refused, key, body) == 401
    assert status(locked_plane, "/sessions", "blue-run-key", RED) == 401
    # the run takes no external groups
    assert status(locked_plane, "/runs/red/groups", "red-run-key", {}) == 409
    assert status(locked_plane, "/runs/red/groups", "blue-run-key", {}) == 401
    for route in ("/runs/red", "/healthz", "/metrics", "/runs/red/batches/0"):
        keys = ("red-run-key", opened["key"], "plane")
        assert [status(locked_plane, route, key) for key in keys] == [401, 401, 200]
    assert status(locked_plane, f"{path}/finish", "red-run-key", ENDED) == 200


@pytest.mark.parametrize("how", ["claimed", "opened by the operator"])
def test_no_run_key_opens_the_sessions_of_the_operator(
    locked_plane: dataplane.planes.ServedPlane, how: str
) -> None:
    if how == "claimed":
        [session] = locked_plane.claim(run_id="red")
    else:
        session = locked_plane.post("/sessions", RED)
    path = f"/sessions/{session['session_id']}"
    ends = ((f"{path}/reward", REWARD), (f"{path}/finish", ENDED))
    for key in ("red-run-key", "blue-run-key", "wrong"):
        assert [status(locked_plane, at, key) for at in (path, f"{path}/v1/models")] == [401, 401]
        assert [status(locked_plane, at, key, body) for at, body in ends] == [401, 401]
    assert [status(locked_plane, at, "plane") for at in (path, f"{path}/v1/models")] == [200, 200]
    assert [status(locked_plane, at, "plane", body) for at, body in ends] == [200, 200]


@pytest.mark.parametrize("how", ["claimed", "opened by the operator", "opened by a client"])
def test_a_session_key_opens_the_agents_routes_of_its_session_only(
    locked_plane: dataplane.planes.ServedPlane, how: str
) -> None:
    if how == "claimed":
        session, other = locked_plane.claim(2, run_id="red")
    else:
        opener = "plane" if how == "opened by the operator" else "red-run-key"
        session, other = [locked_plane.client.post("/sessions", RED, opener) for _ in range(2)]
    key = session["key"]
    session_id = session["session_id"]
    path = f"/sessions/{session_id}"
    for allowed in (key, f"{key}:{session_id}"):
        assert status(locked_plane, f"{path}/v1/models", allowed) == 200
    assert status(locked_plane, "/v1/models", f"{key}:{session_id}") == 200
    for refused in (f"/sessions/{other['session_id']}/v1/models", "/v1/models", path):
        assert status(locked_plane, refused, key) == 401
    assert status(locked_plane, "/v1/models", f"{key}:{other['session_id']}") == 401
    for refused, body in (
        ("/sessions", RED),
        ("/runs/red/groups", {}),
        (f"{path}/reward", REWARD),
        (f"{path}/finish", ENDED),
        ("/runs/red/finished", {"sessions": [ENDED | {"session_id": session_id}]}),
        ("/runs/red/claim", {"runner": "a0", "max": 1}),
    ):
        assert status(locked_plane, refused, key, body) == 401


def test_a_run_key_sees_the_policy_of_its_run_only(locked_plane: dataplane.planes.ServedPlane) -> None:
    for key, models in [("red-run-key", ["red"]), ("blue-run-key", ["blue"]), ("plane", ["blue", "red"])]:
        with OpenAI(base_url=f"{locked_plane.url}/v1", api_key=key) as agent:
            assert [model.id for model in agent.models.list()] == models
    body = {"model": "red", "messages": HI}
    refused = httpx.post(
        f"{locked_plane.url}/v1/chat/completions", json=body, headers={"Authorization": "Bearer blue-run-key"}
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_a_key_and_a_session_fit_into_one_value(locked_plane: dataplane.planes.ServedPlane) -> None:
    opened = locked_plane.client.post("/sessions", RED, "red-run-key")
    for key in ("red-run-key", opened["key"]):
        with OpenAI(base_url=f"{locked_plane.url}/v1", api_key=f"{key}:{opened['session_id']}") as agent:
            assert [model.id for model in agent.models.list()] == ["red"]
    with (
        OpenAI(base_url=f"{locked_plane.url}/v1", api_key=f"blue-run-key:{opened['session_id']}") as agent,
        pytest.raises(openai.AuthenticationError),
    ):
        agent.models.list()


@pytest.mark.parametrize("key", ["short", "a-key-with:a-colon"])
def test_a_run_key_must_be_one(served_plane: dataplane.planes.ServedPlane, key: str) -> None:
    with pytest.raises(AssertionError, match="key: ") as refused:
        served_plane.register(key=key)
    assert key not in str(refused.value)


def test_a_key_with_a_colon_names_no_session() -> None:
    with (
        dataplane.planes.running_app(key="plane:key") as url,
        OpenAI(base_url=f"{url}/v1", api_key="plane:key") as agent,
    ):
        assert agent.models.list().data == []
