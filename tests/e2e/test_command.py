"""`sf train` with all processes that it starts itself: Ctrl-C, resume, the result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from sf_core.cli.stack.command_lock import HeldError, lock_run
from sf_core.cli.stack.supervisor import call
from sf_core.config.yaml_file import load_config
from sf_core.process.child_processes import MARK
from sf_core.reports.view import RunView
from storage.files import read_bytes
from storage.run_directory import RunDirectory
from tests import bench
from tests.bench import waits
from tests.e2e import secrets


def await_part(command: int, module: str) -> psutil.Process:
    """The process of this module below a command."""

    def found() -> psutil.Process | None:
        for child in psutil.Process(command).children(recursive=True):
            # short-lived ones end while they are asked
            with suppress(psutil.Error):
                if module in child.cmdline():
                    return child
        return None

    process: psutil.Process = waits.wait_until(found, module, every_s=0.1)
    return process


@pytest.fixture
def command_proxy() -> Iterator[bench.proxies.SilentProxy]:
    """Proxy for commands, not for this process."""
    with bench.proxies.silent_proxy() as proxy:
        yield proxy


# tests/test_first_run.py has `sf train` with a kill
@pytest.mark.nightly
def test_ctrl_c_leaves_no_process_and_the_run_is_resumed_as_it_was_configured(
    tmp_path: Path, command_proxy: bench.proxies.SilentProxy
) -> None:
    """Also when its data plane is killed, and where proxies are named that do not reach it. Its keys are
    nowhere in what it leaves."""
    file = tmp_path / "run.yaml"
    run = {"run_id": "interrupted", "train": {"iterations": 6}, "storage": {"root": str(tmp_path / "runs")}}
    settings = bench.stacks.cluster.SMALL_RUN | run
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    config = load_config(file)
    env = os.environ | {
        "PREFECT_HOME": bench.stacks.prefect_home.make_prefect_home(tmp_path / "prefect"),
        "SF_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(bench.ROOT),
        **secrets.PLANTED,
        **command_proxy.environment,
    }
    env.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-m", "sf_core", "train", str(file)]

    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    waits.wait_until(
        lambda: bench.stacks.cluster.is_committed(config, 0, "publish") or process.poll() is not None,
        "an iteration",
    )
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 8
    with pytest.raises(HeldError, match=f"process {process.pid} on "):
        lock_run(RunDirectory(config.run_dir))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=waits.patience())
    assert process.returncode == 130, output.decode()
    assert "--set run_id=interrupted" in output.decode()
    # there is no terminal: each thing that is done is a line
    for line in ("creating version 0: the built-in policy", "version 0 is ready"):
        assert output.decode().count(f"  {line}") == 1, output.decode()
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    before = bench.stacks.invariants.manifests(config)
    assert RunDirectory(config.run_dir).newest_attempt().dataplane == ""

    resume = [sys.executable, "-m", "sf_core", "resume", config.run_dir]
    with subprocess.Popen(
        resume, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    ) as process:
        await_part(process.pid, "flows.train")
        await_part(process.pid, "dataplane").kill()
        resumed, _ = process.communicate(timeout=waits.patience(180))
    assert process.returncode == 0, resumed
    assert "held-out reward" in resumed
    last = r"iteration 5, 6 of 6: reward \d\.\d{3}, (held-out .*, )?[\d,]+ tokens/s, [\d.]+ s\n"
    for told in (resumed, Path(config.run_dir, "logs", "flow-train.log").read_text(encoding="utf-8")):
        assert re.search(rf"{last}(.*\n)*.*held-out \d\.\d{{3}} at the end\n", told), told
    after = bench.stacks.invariants.manifests(config)
    assert {key: after[key] for key in before} == before
    for picture in ("summary.png", "timeline.png"):
        assert read_bytes(f"{config.run_dir}/{picture}").startswith(b"\x89PNG")
    events = json.loads(read_bytes(f"{config.run_dir}/timeline.json"))["traceEvents"]
    assert {"iteration 5", "sample", "train", "yield"} <= {event["name"] for event in events}
    assert sorted(RunView(RunDirectory(config.run_dir)).read_devices(range(6))) == [0, 1, 2, 3, 4, 5]
    AutoTokenizer.from_pretrained(f"{config.run_dir}/policy")
    AutoModelForCausalLM.from_pretrained(f"{config.run_dir}/policy")

    again = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=waits.patience(), encoding="utf-8"
    )
    assert again.returncode == 0
    assert "run interrupted is already finished" in again.stdout
    for told in (resumed, again.stdout):
        assert f"use it         sf serve {config.run_dir}\n" in told
    bench.policy_server.check_printed_use(again.stdout, tmp_path / "served")

    (tmp_path / "output").write_text(output.decode() + resumed + again.stdout, encoding="utf-8")
    assert list(tmp_path.glob("prefect/*.db")) and list(tmp_path.glob("runs/*/logs/*.log"))
    assert secrets.leaks(tmp_path, secrets.PLANTED) == []
    assert not command_proxy.was_asked()


@pytest.mark.nightly
def test_a_run_goes_on_when_its_parts_are_killed_and_nothing_outlives_its_command(tmp_path: Path) -> None:
    config = bench.stacks.cluster.small_run("killed", tmp_path / "runs", train={"iterations": 1000})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    env = os.environ | {"PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONPATH": str(bench.ROOT)}
    env.pop("PREFECT_API_URL", None)
    # its first child is supervisord
    command = [sys.executable, "-m", "sf_core", "train", str(file), "--skip-try"]
    process = subprocess.Popen(command, env=env)
    try:
        [supervisor] = waits.wait_until(psutil.Process(process.pid).children, "supervisord", every_s=0.1)
        folder = Path(waits.wait_until(lambda: supervisor.environ().get(MARK), "its folder", every_s=0.1))

        def await_another_iteration() -> None:
            wanted = len(bench.stacks.invariants.manifests(config)) + 8
            waits.wait_until(
                lambda: (
                    len(bench.stacks.invariants.manifests(config)) >= wanted or process.poll() is not None
                ),
                "stages",
                every_s=0.1,
            )
            assert process.poll() is None

        await_another_iteration()
        for part in ("dataplane", "worker-t0", "worker-r0", "prefect-server", "dask-scheduler"):
            psutil.Process(call(folder, "getProcessInfo", part)["pid"]).kill()
            await_another_iteration()
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 8
    finally:
        process.kill()
        process.wait()
    waits.wait_until(lambda: not any(child.is_running() for child in children), "all to end", every_s=0.1)
