"""Deploying to a real Prefect server, from a clone: forms, and what they refuse."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
import yaml
from distributed.system import MEMORY_LIMIT
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectHTTPStatusError

from sf_core.cli.stack.local import free_port
from sf_core.scheduling.cluster import read_workers
from tests.bench import ROOT, stacks, waits


def test_the_deployed_quickstart_is_the_one_of_the_configuration() -> None:
    described = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    parameters = next(d["parameters"] for d in described if d["name"] == "quickstart")
    with open(stacks.quickstart.CONFIG, encoding="utf-8") as file:
        assert parameters == {"config": yaml.safe_load(file)}


def test_a_wrong_value_is_refused_before_the_run_by_the_name_of_its_field(
    server: stacks.prefect_server.Server,
) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rollout": {"group_size": 0}}, "group_size"),
        ({"rollout": {"gate": "most"}}, "gate"),
        ({"train": {"learning_rate": "fast"}}, "learning_rate"),
        ({"trian": {}}, "trian"),
    ]
    for config, field in wrong:
        with pytest.raises(PrefectHTTPStatusError) as refused:
            server.create_run(stacks.prefect_server.DEPLOYMENTS["train"], config)
        assert refused.value.response.status_code == 409
        assert field in refused.value.response.text, refused.value.response.text


def test_what_the_command_line_gives_counts_over_what_is_deployed_and_is_checked_before_the_run_begins(
    server: stacks.prefect_server.Server, cluster: stacks.cluster.Cluster
) -> None:
    memory = {worker.name: worker.memory for worker in read_workers(cluster.services.scheduler)}
    assert memory == {"r0": int(MEMORY_LIMIT), "t0": int(MEMORY_LIMIT), "a0": None, "c0": None}
    # alone, without the deployment's 24 for max_tokens, the length would be refused
    given = {
        "run_id": "given",
        "train": {"iterations": 12},
        "engine": {"max_running": 2 * 10**9, "context_length": 64},
    }
    with server.worker() as worker:
        done = server.call(
            "prefect",
            "deployment",
            "run",
            stacks.prefect_server.DEPLOYMENTS["quickstart"],
            "-p",
            f"config={json.dumps(given)}",
        )
        assert done.returncode == 0, done.stdout + done.stderr

        def named() -> FlowRun | None:
            with server.client() as client:
                found = client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"any_": ["given"]}))
            return found[0] if found else None

        failed = server.await_state(
            waits.wait_until(named, "the run to begin", every_s=0.5), "Failed", worker=worker
        )
    assert failed.state is not None and failed.state.message is not None
    refusal = "2000000000 requests (engine.max_running) of 64 tokens (engine.context_length): lower "
    assert refusal in failed.state.message
    # the run sent it before it failed: its process ended with the Prefect worker
    said = "settings as in the deployment quickstart, except for "
    [told] = [line for line in server.logs(failed, level=logging.INFO) if line.startswith(said)]
    assert sorted(told.removeprefix(said).split(", ")) == [
        "engine.context_length 64 (deployed: None)",
        "engine.max_running 2000000000 (deployed: 128)",
        "run_id 'given' (deployed: None)",
        "train.iterations 12 (deployed: 40)",
    ]
    assert not (server.clone / "runs" / "given").exists()


def test_the_server_can_be_set_up_again(server: stacks.prefect_server.Server) -> None:
    def state() -> list[Any]:
        with server.client() as client:
            automations = client.read_automations()
            pools = client.read_work_pools()
        return sorted((a.name, a.id, a.trigger, a.actions, a.enabled) for a in automations) + [pools[0].id]

    before = state()
    with server.client() as client:
        client.update_work_pool("sf", WorkPoolUpdate(concurrency_limit=7))
    done = server.call("sf_core", "setup-server")
    assert done.returncode == 0, done.stderr
    assert "work pool 'sf': one run at a time" in done.stdout
    assert len(before) == 3 and state() == before
    with server.client() as client:
        assert client.read_work_pool("sf").concurrency_limit == 1


def test_a_server_that_does_not_answer_is_said(server: stacks.prefect_server.Server) -> None:
    api = f"http://127.0.0.1:{free_port()}/api"
    command = [sys.executable, "-m", "sf_core", "setup-server"]
    env = {**server.env, "PREFECT_API_URL": api, "COLUMNS": "200"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=waits.patience(), encoding="utf-8"
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"PREFECT_API_URL names {api}, but nothing answers there" in done.stderr
    assert done.stderr.endswith("start that Prefect server, or correct PREFECT_API_URL\n")
