"""Real runs whose agents compute more than their engines, and less."""

from __future__ import annotations

import json
import re
import ssl
from pathlib import Path
from typing import Any

import certifi
import pytest

from sf_core.agents.authorities import equal_folder
from sf_core.config import RunConfig
from storage.run_directory import RunDirectory
from tests.bench.stacks.cluster import Cluster
from tests.bench.stacks.invariants import check_result, manifests

# tests/sf_core/reports/test_warnings.py has the sentence
pytestmark = pytest.mark.nightly

BURNT_S = 0.4
"""CPU time of a costly session."""

AGENTS = f"""
import asyncio, json, os, time
from tests.bench.stacks.echo_package import reward, tasks

async def ask(task, endpoint):
    async with endpoint.client() as client:
        reply = await client.chat.completions.create(
            model=endpoint.model, messages=[{{"role": "user", "content": task.prompt}}]
        )
    return reply.choices[0].message.content or ""

async def waiting(task, endpoint):
    await asyncio.sleep({BURNT_S})
    return await ask(task, endpoint)

async def costly(task, endpoint):
    until = time.thread_time() + {BURNT_S}
    while time.thread_time() < until:
        pass
    return await ask(task, endpoint)

async def telling(task, endpoint):
    found = {{name: value for name, value in os.environ.items() if name.startswith("SSL_CERT_")}}
    open(os.path.join(os.path.dirname(__file__), "environment.json"), "w").write(json.dumps(found))
    return await ask(task, endpoint)
"""


def run(cluster: Cluster, agent: str) -> RunConfig:
    (cluster.user_code / "costly_agents.py").write_text(AGENTS, encoding="utf-8")
    config = cluster.config(
        f"{agent}-agents",
        environment={"agent": f"costly_agents:{agent}"},
        evaluate={"every": 1000, "num_tasks": 4},
    )
    cluster.finish(config, cluster.start(config))
    check_result(config)
    return config


def figures(config: RunConfig) -> tuple[list[str], dict[str, Any], list[float]]:
    """What the run says of its agents, and CPU seconds and sessions by worker and by iteration."""
    summary = json.loads(Path(RunDirectory(config.run_dir).path("summary.json")).read_text(encoding="utf-8"))
    spent = [
        sum(told["cpu_s"] for told in manifest["data"]["runners"].values())
        for (_, stage), manifest in sorted(manifests(config).items())
        if stage == "rollout"
    ]
    about = [concern for concern in summary["concerns"] if "endpoint.client()" in concern]
    return about, summary["runners"], spent


def test_a_run_says_that_it_waits_for_the_code_of_its_agents(cluster: Cluster) -> None:
    config = run(cluster, "costly")
    about, runners, spent = figures(config)
    # the log has the figure of the first such iteration, the summary that of the newest
    free = r"the engines had no request for \d+% of the time"
    sentence = rf"{free}, because the code of the agents computed \(CPU time per session"
    assert len(about) == 1 and re.match(rf"{sentence}: ", about[0])
    assert re.search(sentence, cluster.log(config))
    [(_, told)] = runners.items()
    assert told["sessions"] >= 12 and told["cpu_s_per_session"] >= 0.8 * BURNT_S
    assert abs(sum(spent) - told["cpu_s"]) < 0.01


def test_a_run_whose_agents_wait_for_something_else_says_nothing_of_them(cluster: Cluster) -> None:
    about, runners, _ = figures(run(cluster, "waiting"))
    assert about == []
    [(_, told)] = runners.items()
    assert told["sessions"] >= 12 and told["cpu_s_per_session"] < 0.5 * BURNT_S


def test_agents_find_certificate_authorities_as_cheaply_as_the_host_allows(cluster: Cluster) -> None:
    run(cluster, "telling")
    found = json.loads((cluster.user_code / "environment.json").read_text(encoding="utf-8"))
    given = {name: value for name, value in cluster.stack.env.items() if name.startswith("SSL_CERT_")}
    folder = equal_folder(given, ssl.get_default_verify_paths(), certifi.where())
    assert found == (given if folder is None else {"SSL_CERT_DIR": folder})
