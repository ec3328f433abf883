"""`sf worker` and plain `dask worker` as real processes at a real scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import dask
import psutil
import pytest
from distributed import Client
from typer.testing import CliRunner

from sf_core.cli.main import app
from sf_core.cli.stack.local import start_dask_worker
from sf_core.cli.stack.supervisor import Process, StackError, Supervisor
from sf_core.config import RunConfig, WorkerConfig
from sf_core.config.devices import DEVICES, Device
from sf_core.scheduling import cluster
from sf_core.scheduling.cluster import end_tasks, list_connected
from sf_core.scheduling.plan import Worker
from sf_core.scheduling.template.nanny import template_modules
from sf_core.scheduling.worker import DASK_SETTINGS, worker_environment
from sf_core.scheduling.worker_state import current_worker
from tests import bench
from tests.bench import waits
from tests.bench.stacks.nannies import template_of

pytestmark = pytest.mark.system

PRELOAD = ("--preload", "sf_core.scheduling.preload")


def what_is_kept() -> tuple[str, str, Device | None]:
    worker = current_worker()
    return worker.name, worker.host, worker.device.figures


def test_workers_started_by_us_or_by_dask_are_read_with_their_tags_and_devices(
    worker_bench: bench.workers.WorkerBench,
) -> None:
    started = [
        worker_bench.sf_worker("t0", "--tags", "rollout,train,big", "--device-kind", "h100"),
        worker_bench.dask_worker("r0", "--resources", "rollout=1 @r0=1", *PRELOAD),
        worker_bench.dask_worker("r1", "--resources", "rollout=1 @r1=1", *PRELOAD, "--device-kind", "h20"),
    ]
    assert [worker_bench.await_worker(process) for process in started] == [
        Worker("t0", frozenset({"rollout", "train", "big"}), DEVICES["h100"]),
        Worker("r0", frozenset({"rollout"})),
        Worker("r1", frozenset({"rollout"}), DEVICES["h20"]),
    ]
    often = {"distributed.client.scheduler-info-interval": "1ms"}
    with dask.config.set(often), Client(worker_bench.scheduler, set_as_default=False) as client:
        # whatever the client asks for by itself meanwhile
        assert all(len(list_connected(client)) == 3 for _ in range(100))
        kept = client.submit(what_is_kept, resources={"@r1": 1}).result(timeout=waits.patience())
    assert kept == ("r1", "127.0.0.1", DEVICES["h20"])
    quickstart = str(bench.ROOT / "configs" / "quickstart.yaml")
    refused = CliRunner().invoke(app, ["plan", quickstart, "--scheduler", worker_bench.scheduler])
    assert refused.exit_code == 2
    assert "no worker has the tag 'agent' or 'cpu'; workers: " in refused.output
    worker_bench.end(*started)


def test_workers_are_awaited_while_their_scheduler_is_young(
    worker_bench: bench.workers.WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lost the one before it, and join one after the other."""
    started: list[Process] = []

    def hear(sentence: str) -> None:
        assert sentence.startswith("no worker has the tag 'agent'")
        started.append(worker_bench.sf_worker("a0", "--tags", "agent"))
        started.append(worker_bench.sf_worker("t0", "--tags", "rollout,train,cpu"))

    monkeypatch.setattr(cluster, "JOIN_S", 0.0)
    with pytest.raises(ValueError, match="no worker has the tag 'agent'"):
        cluster.await_plan(worker_bench.scheduler, RunConfig(), hear)
    assert started == []
    monkeypatch.setattr(cluster, "JOIN_S", 3600.0)
    found = cluster.await_plan(worker_bench.scheduler, RunConfig(), hear)
    assert (found.trainers, found.agent, len(started)) == (("t0",), ("a0",), 2)
    worker_bench.end(*started)


def test_the_device_and_the_settings_outlive_the_death_of_the_workers_process(
    worker_bench: bench.workers.WorkerBench,
) -> None:
    arguments = ("--tags", "train", "--device-kind", "h100", "--threads", "3")
    process = worker_bench.sf_worker("t1", *arguments, OMP_WAIT_POLICY="ACTIVE")
    before = worker_bench.await_worker(process)
    await_nanny(worker_bench, "t1")
    end(bench.workers.tasks_process(process))
    with Client(worker_bench.scheduler, set_as_default=False) as client:
        # it waits for the process that the nanny starts
        seen = client.submit(seen_by_a_task, resources={"@t1": 1}).result(timeout=waits.patience())
    assert worker_bench.await_worker(process) == before == Worker("t1", frozenset({"train"}), DEVICES["h100"])
    assert seen == {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
    worker_bench.end(process)


def await_nanny(worker_bench: bench.workers.WorkerBench, name: str) -> None:
    """Wait until the nanny runs. Before that, one whose process dies ends too."""
    waits.wait_until(lambda: name in running_nannies(worker_bench.scheduler), "the nanny to run", every_s=0.2)


def end(process: psutil.Process) -> None:
    process.kill()
    process.wait(waits.patience())


def running_nannies(scheduler: str) -> list[str]:
    """Names of the workers whose nannies are running."""
    with Client(scheduler, set_as_default=False) as client:
        status = client.run(lambda dask_worker: dask_worker.status.name, nanny=True)
        workers = list_connected(client)
    return [workers[address].name for address, word in status.items() if word == "running"]


def seen_by_a_task() -> dict[str, str]:
    return {key: os.environ[key] for key in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY")}


def test_a_worker_is_forked_from_a_template_that_has_its_modules_and_settings(
    worker_bench: bench.workers.WorkerBench,
) -> None:
    process = worker_bench.sf_worker("t2", "--tags", "train", "--threads", "3", SF_EMULATED="")
    assert worker_bench.await_worker(process).shared_host == "127.0.0.1", "it computes on the host's CPU"
    await_nanny(worker_bench, "t2")
    nanny = psutil.Process(process.pid())
    template = template_of(process.pid())
    first = bench.workers.tasks_process(process)
    assert template is not None
    assert [has_torch(one) for one in (nanny, template, first)] == [False, True, True]
    # the allocator reads them when a program begins, which a fork does not
    begun_with = template.environ()
    assert {name: begun_with.get(name) for name in MALLOC} == {name: DASK_SETTINGS[name] for name in MALLOC}
    # but for that of pyarrow's allocator, which is made for forks
    assert [name for name in thread_names(template) if name != "jemalloc_bg_thd"] == ["python"]
    for killed in (first, template):
        before = bench.workers.tasks_process(process)
        end(killed)
        with Client(worker_bench.scheduler, set_as_default=False) as client:
            task = client.submit(computed_by_a_task, resources={"@t2": 1}, pure=False)
            # torch takes no more than there are cores
            assert task.result(timeout=waits.patience()) == (min(3, os.cpu_count() or 1), "3")
        waits.wait_until(lambda before=before: has_ended(before), "the worker to end", every_s=0.1)
        await_nanny(worker_bench, "t2")
    members = [nanny, *nanny.children(recursive=True)]
    end(nanny)
    waits.wait_until(lambda: all(map(has_ended, members)), "template and worker to end", every_s=0.1)
    worker_bench.end(process)


MALLOC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def computed_by_a_task() -> tuple[int, str]:
    import torch

    torch.ones(300, 300) @ torch.ones(300, 300)
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in place.path for place in process.memory_maps())


def thread_names(process: psutil.Process) -> list[str]:
    return [
        name.read_text(encoding="utf-8").strip() for name in Path(f"/proc/{process.pid}/task").glob("*/comm")
    ]


def has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def test_a_template_has_no_cuda_context() -> None:
    """A fork of a process with a CUDA context cannot use the device, so no import may ask for one."""
    script = f"""
import importlib, torch
def refuse(*_):
    raise AssertionError("asked for a device")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse
for name in {template_modules(("rollout", "train", "agent", "cpu"))}:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=bench.ROOT, stderr=subprocess.PIPE, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr


def test_a_given_up_task_that_goes_on_is_ended_and_that_of_another_owner_is_left(
    worker_bench: bench.workers.WorkerBench,
) -> None:
    started = [worker_bench.sf_worker(name, "--tags", "spot") for name in ("f0", "f1")]
    for process in started:
        worker_bench.await_worker(process)
    before = [bench.workers.tasks_process(process) for process in started]
    with Client(worker_bench.scheduler, set_as_default=False) as client:
        futures = []
        for name, owner in (("f0", "run.1"), ("f1", "another.1")):
            with dask.annotate(resources={f"@{name}": 1}, owner=owner):
                futures.append(client.submit(time.sleep, 600, key=f"sleep-{name}"))
        both = ["sleep-f0", "sleep-f1"]
        waits.wait_until(
            lambda: sorted(bench.workers.running_tasks(client)) == both, "both to run", every_s=0.1
        )
        futures[0].cancel()
        assert end_tasks(worker_bench.scheduler, "run.1", patience_s=0.2) == ["f0"]
        assert end_tasks(worker_bench.scheduler, "run.1", patience_s=0.2) == []
        assert bench.workers.running_tasks(client) == ["sleep-f1"]
    assert [process.is_running() for process in before] == [False, True]
    worker_bench.end(*started)


def test_a_probed_device_is_read_with_what_was_measured(worker_bench: bench.workers.WorkerBench) -> None:
    process = worker_bench.sf_worker("p0", "--tags", "train", "--probe", "--threads", "1")
    device = worker_bench.await_worker(process).device
    assert device is not None
    assert (device.kind, device.bytes_per_weight) == ("measured", 4)
    assert device.peak_flops > 1e8
    worker_bench.end(process)


def test_a_name_that_is_connected_is_refused(worker_bench: bench.workers.WorkerBench) -> None:
    process = worker_bench.sf_worker("x0", "--tags", "spot")
    worker_bench.await_worker(process)
    refused = CliRunner().invoke(
        app, ["worker", "--scheduler", worker_bench.scheduler, "--tags", "spot", "--name", "x0"]
    )
    sentence = f"error: a worker named 'x0' is connected to {worker_bench.scheduler}; choose another --name\n"
    assert (refused.exit_code, refused.output) == (2, sentence)
    worker_bench.end(process)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--tags", "a b"],
            "--tags: 'a b' is not a valid tag or name: use letters, digits, '.', '_' and '-'",
        ),
        (["--tags", "train,"], "--tags: '' is not a valid tag or name: use letters"),
        (["--tags", "train", "--name", "a=b"], "'a=b' is not a valid tag or name: use letters"),
        (["--tags", "train", "--device", "gpu"], "--device: expected cpu or cuda:N, got 'gpu'"),
        (["--tags", "train", "--device", "cuda:64"], "device cuda:64 does not exist: torch "),
        (
            ["--tags", "train", "--device-kind", "k80"],
            "--device-kind: unknown device kind 'k80'; use one of ",
        ),
        (
            ["--tags", "train", "--device-kind", "h20", "--probe"],
            "--probe measures the device that --device-kind names: use only one of the two",
        ),
        (["--tags", "train", "--host", "0.0.0.0"], "other machines can reach 0.0.0.0, and Dask executes"),
        (["--tags", "train"], "no Dask scheduler answers at tcp://127.0.0.1:9: "),
    ],
)
def test_a_worker_that_cannot_be_is_refused_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.setattr("sf_core.scheduling.cluster.ANSWER_S", 1.0)
    refused = CliRunner().invoke(app, ["worker", "--scheduler", "tcp://127.0.0.1:9", *arguments])
    assert refused.exit_code == 2
    assert refused.output.startswith(f"error: {sentence}")
    assert len(refused.output.splitlines()) == 1


def test_a_local_worker_whose_device_is_not_there_is_named(tmp_path: Path) -> None:
    missing = WorkerConfig(tags=("train",), device="cuda:64")
    with pytest.raises(StackError, match="worker t0: device cuda:64 does not exist: "):
        start_dask_worker(Supervisor(tmp_path, tmp_path, {}), "t0", missing, "tcp://127.0.0.1:9", tmp_path)


def test_a_local_worker_publishes_the_kind_of_its_configuration() -> None:
    environment = worker_environment(WorkerConfig(tags=("train",), device_kind="h20"))
    assert '"kind": "h20"' in environment["DASK_DISTRIBUTED__WORKER__PRELOAD_ARGV"]
    assert "DASK_DISTRIBUTED__WORKER__PRELOAD_ARGV" not in worker_environment(WorkerConfig(tags=("cpu",)))
