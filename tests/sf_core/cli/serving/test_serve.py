"""`sf serve`: a stored policy through the gateway, asked by the public clients."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from anthropic import Anthropic

from sf_core.cli.serving.local_plane import local_plane
from sf_core.cli.serving.serve import find_policy, session_rules
from storage.files import list_files
from storage.run_directory import RunDirectory
from storage.tables.trajectories import read_trajectories
from tests import bench
from tests.bench import policy_server
from tests.bench.commands import sf


@pytest.fixture
def published_run(tmp_path: Path) -> RunDirectory:
    return policy_server.publish_run(tmp_path)


def test_the_newest_policy_answers_public_clients_and_leaves_nothing(
    published_run: RunDirectory, tmp_path: Path
) -> None:
    files = list_files(published_run.uri)
    served = policy_server.Served(published_run.uri, log=tmp_path / "log")
    try:
        assert "serving version 3 of taught" in served.output
        messages = [{"role": "user", "content": "What is 3+4?"}]
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=policy_server.KEY, max_retries=0) as client:
            reply = client.chat.completions.create(
                model="policy",
                messages=messages,
                max_tokens=4,
                temperature=0,  # type: ignore[arg-type]
            )
            chunks = client.chat.completions.create(
                model="policy",
                messages=messages,
                max_tokens=4,
                temperature=0,
                stream=True,  # type: ignore[arg-type]
            )
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            response = client.responses.create(model="policy", input="What is 3+4?", max_output_tokens=4)
        assert streamed == reply.choices[0].message.content
        assert response.usage is not None and response.usage.output_tokens in range(1, 5)
        with Anthropic(base_url=served.url, api_key=policy_server.KEY, max_retries=0) as anthropic:
            said = anthropic.messages.create(model="policy", max_tokens=4, messages=messages)  # type: ignore[arg-type]
        assert said.usage.output_tokens in range(1, 5)
        own = {"Authorization": f"Bearer {policy_server.KEY}"}
        refused = httpx.post(f"{served.url}/sessions", json={"run_id": "taught"}, headers=own)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_recorded")
        declared = httpx.post(f"{served.url}/runs/taught/groups", json={}, headers=own)
        assert declared.json()["error"]["code"] == "no_outside_groups"
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        assert httpx.get(f"{served.url}/runs/taught", headers=own).status_code == 401, "a command of flows"
    finally:
        code = served.end(signal.SIGINT)
    assert (code, served.output.splitlines()[-1]) == (0, "stopped")
    assert "Traceback" not in served.output
    assert list_files(published_run.uri) == files


def test_a_session_is_recorded_in_the_folder_that_is_named_with_the_temperature_that_was_used(
    published_run: RunDirectory, tmp_path: Path
) -> None:
    record = tmp_path / "kept"
    served = policy_server.Served(f"{published_run.uri}@2", "--record", str(record), log=tmp_path / "log")
    own = {"Authorization": f"Bearer {policy_server.KEY}"}
    try:
        assert '{"run_id": "kept"}' in served.output
        with httpx.Client(base_url=served.url, headers=own, timeout=bench.waits.patience()) as http:
            session = http.post("/sessions", json={"run_id": "kept", "task_id": "one"}).json()
            with openai.OpenAI(base_url=session["base_url"], api_key=policy_server.KEY) as client:
                client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": "hi"}],
                    max_tokens=4,
                    temperature=0.5,
                )
            # temperatures at which a division by them overflows
            for temperature in (1e-38, 1e-44):
                body = {"model": "policy", "temperature": temperature, "max_tokens": 4}
                chat = body | {"messages": [{"role": "user", "content": "hi"}]}
                for path, asked in (
                    ("/v1/completions", body | {"prompt": "hi", "top_p": 1e-44, "top_k": 2**63 - 1}),
                    ("/v1/messages", chat),
                    (f"/sessions/{session['session_id']}/v1/chat/completions", chat),
                ):
                    answered = http.post(path, json=asked)
                    assert answered.status_code == 200, answered.text
            report = {"status": "finished", "reward": 0.5}
            ended = http.post(f"/sessions/{session['session_id']}/finish", json=report)
            assert ended.status_code == 200, ended.text
        assert served.process.poll() is None
    finally:
        served.end()
    [uri] = RunDirectory(str(record)).list_partitions("opened")[2]
    recorded = read_trajectories(uri)
    assert set(recorded["task_id"].to_pylist()) == {"one"}
    used = {turn["temperature"] for turns in recorded["turns"].to_pylist() for turn in turns}
    assert sorted(used - {None}) == pytest.approx([0.01, 0.5])


def test_a_request_that_makes_the_forward_pass_fail_is_refused_and_the_engine_goes_on(
    published_run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.engines.fatal.make_forward_fatal(33, bench.engines.fatal.fail, monkeypatch.setattr)
    policy = find_policy(published_run.uri, "torch")
    rules = session_rules(policy.config.rollout)
    own = {"Authorization": f"Bearer {policy_server.KEY}"}
    with local_plane(
        policy, name="taught", run_dir=str(tmp_path / "own"), rollout=rules, key=policy_server.KEY
    ) as plane:
        bench.waits.wait_until(plane.is_serving.is_set)

        def ask(prompt: list[int]) -> int:
            body = {"model": "policy", "prompt": prompt, "max_tokens": 4}
            url = f"{plane.url}/v1/completions"
            return httpx.post(url, json=body, headers=own, timeout=bench.waits.patience()).status_code

        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(ask, [[5, 6]] * 4 + [[5, 33]] + [[5, 7]] * 3)] == [200] * 4 + [502] + [200] * 3
        assert [ask([5, 33]), ask([5, 6])] == [502, 200]
        assert not plane.has_failed.is_set()


def test_a_version_that_is_not_kept_is_answered_with_those_that_are(published_run: RunDirectory) -> None:
    for version in (1, 4):
        code, output = sf("serve", f"{published_run.uri}@{version}")
        assert code == 2
        assert f"taught: the weights of version {version} are not stored; stored versions: 0, 2, 3" in output


def test_a_model_folder_is_told_from_a_run(published_run: RunDirectory) -> None:
    code, output = sf("serve", published_run.start_dir)
    assert (code, f"{published_run.start_dir} is a model folder, not a run" in output) == (2, True), output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "0.0.0.0"], "other machines can reach 0.0.0.0: give a --key, or serve on 127.0.0.1"),
        (["--key", "short"], "--key must have 8 characters or more and no colon"),
        (["--key", "long-but:colon"], "--key must have 8 characters or more and no colon"),
    ],
)
def test_keys_that_keep_nobody_out_are_refused(
    published_run: RunDirectory, arguments: list[str], sentence: str
) -> None:
    code, output = sf("serve", published_run.uri, *arguments)
    assert (code, sentence in output) == (2, True), output


def test_a_runs_own_directory_is_not_recorded_into(published_run: RunDirectory) -> None:
    code, output = sf("serve", published_run.uri, "--record", published_run.uri)
    assert (code, "is the directory of a run" in output) == (2, True), output
