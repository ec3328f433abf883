"""`sf train` and `sf resume` before and after a flow runs: what is finished, and why a flow failed."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from sf_core.cli.launch import _run_once
from sf_core.cli.stack.command_lock import lock_run
from sf_core.cli.stack.local import local_stack
from sf_core.cli.stack.processes import Part
from storage.run_directory import RunDirectory
from tests.bench import runs
from tests.bench.commands import sf
from tests.bench.waits import patience

SUMMARY = {
    "iterations": 2,
    "reward_before": 0.25,
    "reward_after": 0.75,
    "seconds_total": 60.0,
    "tokens_generated": 1000,
    "tokens_sampled": 1500,
    "tokens_per_second": 20.0,
    "idle_fraction": {"r0": 0.5, "t0": 0.25},
    "idle_by_cause": {"r0": {"start": 0.08, "loading": 0.42, "requests": 0.0}, "t0": {"start": 0.25}},
}


@pytest.fixture
def finished_run(tmp_path: Path) -> RunDirectory:
    """A finished run without a worker that can train, so that continuing it is refused at once."""
    run = RunDirectory(str(tmp_path / "[v2]" / "r"))
    workers = {"r0": {"tags": ["rollout"]}}
    runs.configure(
        run, train={"iterations": 2}, cluster={"workers": workers}, storage={"root": str(tmp_path)}
    )
    runs.pretend(run, 2, finished=False)
    run.write_summary(SUMMARY)
    return run


def test_a_finished_run_is_shown_and_not_run_again(finished_run: RunDirectory) -> None:
    code, output = sf("resume", finished_run.uri)
    assert code == 0, output
    assert output.startswith(
        "run r is already finished; to continue it, raise train.iterations; to start a new run, set "
        "another run_id held-out reward 0.25 → 0.75 in 2 iterations, 60 s"
    )
    assert "tokens 1,500 sampled, 1,000 of them in sessions that count, 20 per second" in output
    assert f"policy {finished_run.policy_dir} use it sf serve {finished_run.uri} trajectories" in output
    assert "idle devices r0 50% (loading 42%, start 8%), t0 25% (start 25%) picture" in output


def test_the_summary_names_the_prefect_server_that_shows_the_run(
    finished_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert "Prefect UI prefect server start (then http://127.0.0.1:4200)" in sf("resume", finished_run.uri)[1]
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:14200/api")
    assert "Prefect UI http://127.0.0.1:14200" in sf("resume", finished_run.uri)[1]


@pytest.fixture
def stopped_run(finished_run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunDirectory:
    """A run that could be resumed."""
    runs.configure(finished_run, train={"iterations": 3}, storage={"root": str(tmp_path / "[v2]")})
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("SF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return finished_run


def test_a_second_command_on_a_run_is_told_who_works_on_it(stopped_run: RunDirectory) -> None:
    program = "import sys, time; from sf_core.cli.stack.command_lock import lock_run\n"
    program += "from storage.run_directory import RunDirectory\n"
    program += "lock = lock_run(RunDirectory(sys.argv[1])); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program, stopped_run.uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout
        first.stdout.readline()
        code, output = sf("resume", stopped_run.uri)
        who = f"run r is in use by another command, process {first.pid} on {socket.gethostname()} since "
        assert (code, who in output, "stop that command with Ctrl-C" in output) == (1, True, True), output
        assert first.poll() is None
        first.kill()
    with lock_run(stopped_run):
        pass


def test_runs_of_one_name_at_several_places_are_used_at_the_same_time(
    stopped_run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as held:
        for root in ("runs", "memory://a", "memory://b"):
            run = RunDirectory(f"{root}/r")
            runs.configure(run, train={"iterations": 3}, storage={"root": root})
            Path(run.local_dir).mkdir(parents=True, exist_ok=True)
            held.enter_context(lock_run(run))
            code, output = sf("resume", run.uri, "--skip-try")
            assert (code, "run r is in use by another command" in output) == (1, True), output


@pytest.mark.parametrize("variable", ["PREFECT_HOME", "SF_CACHE_DIR"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(
    stopped_run: RunDirectory, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "/dev/null/x")
    code, output = sf("resume", stopped_run.uri)
    sentence = f"cannot be written (Not a directory): set {variable} to another folder"
    assert (code, sentence in output) == (2, True), output


def test_too_few_open_files_are_refused_before_anything_starts(stopped_run: RunDirectory) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        code, output = sf("resume", stopped_run.uri)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (code, "this process may open 512 files" in output) == (2, True), output


def test_an_emulated_run_is_said_to_have_no_policy(finished_run: RunDirectory, tmp_path: Path) -> None:
    runs.configure(
        finished_run, train={"iterations": 2}, engine={"kind": "emulated"}, storage={"root": str(tmp_path)}
    )
    code, output = sf("resume", finished_run.uri)
    assert (code, "policy none, because it is emulated trajectories" in output) == (0, True), output


def test_a_finished_run_goes_on_with_more_iterations(finished_run: RunDirectory, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump({"run_id": "r", "storage": {"root": finished_run.uri.rsplit("/", 1)[0]}}),
        encoding="utf-8",
    )
    code, output = sf("train", str(file), "--set", "train.iterations=3")
    assert "run r: uses its stored configuration, except for train.iterations 3 (was 2)" in output
    assert (code, "no worker has the tag" in output) == (1, True), output
    code, output = sf("train", str(file), "--set", "train.iterations=1")
    assert (code, "run r has already published version 2, so train.iterations" in output) == (1, True), output


def test_a_run_whose_summary_is_from_before_it_was_given_more_iterations_is_resumed(
    finished_run: RunDirectory,
) -> None:
    runs.configure(finished_run, train={"iterations": 3}, cluster={"workers": {"r0": {"tags": ["rollout"]}}})
    runs.commit(finished_run, 2, "publish")
    code, output = sf("resume", finished_run.uri)
    assert (code, "no worker has the tag" in output) == (1, True), output


def test_a_flow_that_is_killed_is_not_explained_by_an_earlier_one(tmp_path: Path) -> None:
    with local_stack(tmp_path / "logs") as stack:

        def failure(script: str) -> str:
            part = Part("flow-train", ["sh", "-c", script], {}, once=True)
            return _run_once(part, stack, lambda process: process.wait(patience()))[0]

        assert failure("echo ValueError: seed; exit 3").startswith("ValueError: seed; log: ")
        assert failure("kill -9 $$").startswith("the flow ended with code -1; log: ")


@pytest.mark.parametrize("place", ["logs", ".stack/logs"])
def test_the_log_that_is_named_has_the_traceback_of_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".stack" / "logs").mkdir(parents=True)
    failed = "my_agent.py:12: agent raised KeyError: "
    logged = (
        f"13:41:36.489 | WARNING | sf_core.agents.runner - session r.3.0.a0 failed: {failed}'a'\nTraceback"
    )
    with local_stack(tmp_path / "logs") as stack:

        def failure(reason: str) -> str:
            part = Part("flow-train", ["echo", reason], {}, once=True)
            return _run_once(part, stack, lambda process: process.wait(patience()) or 1)[0]

        reason = f"RuntimeError: the rollout: every session fails; the last failed session: {failed}'b'"
        flow = f"log: {stack.logs}/flow-train.log"
        assert failure(reason) == f"{reason}; {flow}"
        (tmp_path / place / "worker-a0.log").write_text(logged.replace(":12:", ":7:"), encoding="utf-8")
        (tmp_path / place / "worker-a1.log").write_text(logged, encoding="utf-8")
        assert failure(reason) == f"{reason}; log: {tmp_path}/{place}/worker-a1.log"
        assert failure("ValueError: seed") == f"ValueError: seed; {flow}"
