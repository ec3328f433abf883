"""Agents and rewards with which no session can succeed: `sf train` refuses them before anything starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sf_core.cli.rehearsal import check
from sf_core.cli.rehearsal.check import check_first_task, is_rehearsed
from sf_core.config import RunConfig
from sf_core.config.yaml_file import load_config
from storage.run_directory import RunDirectory
from tests import bench
from tests.bench import refusals
from tests.bench.commands import sf

MODULE = """
import os
import subprocess
import sys
import time
from sf_core.types import Task

def tasks(split, index):
    return Task(f"add-{split}-{index}", "addition", f"What is {index}+3?", answer=str(index + 3))

async def raises(task, endpoint):
    print("printed by the agent")
    raise KeyError("boom")

async def ends_the_process(task, endpoint):
    with open("loaded", "w") as file:
        file.write(" ".join({"torch", "transformers"} & sys.modules.keys()))
    os._exit(7)

async def blocks(task, endpoint):
    child = subprocess.Popen(["sleep", "600"])
    with open("pid", "w") as file:
        file.write(str(child.pid))
    time.sleep(600)

def reward(task, answer):
    return float(answer == task.answer)
"""
TRYING = "trying one task with a scripted answer before the start (--skip-try leaves this out)"


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the module."""
    (tmp_path / "first_agents.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("PREFECT_API_URL", "SF_SCHEDULER", "SF_DATAPLANE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("SF_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path
    sys.modules.pop("first_agents", None)


def overrides(agent: str, root: Path) -> list[str]:
    named = {"tasks": "tasks", "agent": agent, "reward": "reward"}
    return [
        *(f"environment.{part}=first_agents:{name}" for part, name in named.items()),
        f"storage.root={root}",
        "run_id=r",
    ]


def configured(agent: str, root: Path) -> RunConfig:
    return load_config("quickstart", overrides(agent, root))


def test_an_agent_that_raises_is_refused_before_anything_starts(agents: Path) -> None:
    (runs := agents / "runs").mkdir()
    sets = [word for one in overrides("raises", runs) for word in ("--set", one)]
    code, output = sf("train", "quickstart", *sets)
    assert (code, output.startswith(TRYING)) == (1, True), output
    sentence = output.partition("error: ")[2]
    refusals.check_sentence(
        sentence,
        "the agent failed at first_agents.py:13: KeyError: 'boom' (so it was for two tasks that were tried "
        "with a scripted answer before the start): correct the code, which `sf try` shows in more detail, or "
        "start the run all the same with --skip-try",
    )
    assert refusals.snapshot(runs) == {}


def test_an_agent_that_ends_its_process_is_only_told_and_nothing_large_is_loaded(agents: Path) -> None:
    told: list[str] = []
    check_first_task(configured("ends_the_process", agents), told.append)
    assert told == [
        TRYING,
        "look at this: the process that tried one task before the start ended without a result; the run "
        "starts",
    ]
    assert (agents / "loaded").read_text(encoding="utf-8") == ""


def test_an_agent_that_blocks_is_stopped_with_all_that_it_started(
    agents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "DEADLINE_S", 0.0)
    for seconds in (5.0, 20.0, 80.0):
        monkeypatch.setattr(check, "START_S", seconds)
        told = list[str]()
        check_first_task(configured("blocks", agents), told.append)
        started = agents / "pid"
        # a busy machine may take longer to start it
        if started.exists() and started.read_text(encoding="utf-8"):
            break
    note = "the task that was tried before the start did not end and was stopped"
    assert told == [TRYING, f"look at this: {note}; the run starts"]
    pid = int((agents / "pid").read_text(encoding="utf-8"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_only_new_runs_whose_agents_work_here_are_rehearsed(
    agents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("raises", agents)
    assert is_rehearsed(config)
    for change in (
        {"engine": {"kind": "emulated"}},
        {"rollout": {"groups_per_batch": 2, "outside_groups": 2}},
        {"cluster": {"scheduler": "tcp://10.0.0.1:8786"}},
    ):
        assert not is_rehearsed(RunConfig.model_validate({"run_id": "r", **change}))
    monkeypatch.setenv("SF_SCHEDULER", "tcp://10.0.0.1:8786")
    assert not is_rehearsed(config)


def test_a_run_with_sessions_is_not_rehearsed_again(agents: Path) -> None:
    run = RunDirectory(str(agents / "r"))
    config = bench.runs.configure(run, train={"iterations": 3}, storage={"root": str(agents)})
    assert is_rehearsed(config), "it was stopped before its first batch"
    bench.runs.pretend(run, 1, finished=False)
    assert not is_rehearsed(config)
