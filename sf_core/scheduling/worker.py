"""How our Dask workers are started, by a local stack or `sf worker`: one process and one thread per device,
its tags and private name as resources, and the Dask settings that this needs.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict

from sf_core.config import WorkerConfig
from sf_core.config.addresses import is_loopback
from sf_core.config.devices import Device, find_device
from sf_core.process.environment_variables import count_gpus, visible_cuda_devices
from sf_core.process.import_path import module_environment, python_module
from sf_core.scheduling.cluster import read_workers
from sf_core.scheduling.plan import COMPUTING
from sf_core.scheduling.tls import require_tls
from sf_core.settings import is_word

DASK_SETTINGS = {
    # a stage may outlive several kills of its worker; giving up after one would end the run
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "10",
    "DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT": "5m",
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "30m",
    "DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING": "False",
    # the manager would keep the result of training only on the worker that publishes: if that one is killed,
    # Dask runs training again, which waits for a lease that waits for what comes after publishing
    "DASK_DISTRIBUTED__SCHEDULER__ACTIVE_MEMORY_MANAGER__START": "False",
    "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    # pages of logs and tasks: a strange page could read them, if its host's name was rebound to loopback
    "DASK_DISTRIBUTED__SCHEDULER__HTTP__ROUTES": "[]",
    "DASK_DISTRIBUTED__WORKER__HTTP__ROUTES": "[]",
    "DASK_DISTRIBUTED__ADMIN__TICK__LIMIT": "30s",
    # Dask's default of 20 ms takes 1.5% of a core, of every scheduler, nanny and worker, to do nothing
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
    "DASK_LOGGING__DISTRIBUTED": "warning",
    # Dask's nanny sets a trim threshold of 64 KiB, with which torch maps and unmaps memory all the time:
    # training took twice as long (docs/decisions/005)
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
    # threads that wait for others of their worker leave the core to other workers
    "OMP_WAIT_POLICY": "PASSIVE",
    # progress bars of model loading have no place in logs
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of schedulers and workers alike."""
NO_DASHBOARD = ("--no-dashboard", "--dashboard-address", "127.0.0.1:0")
"""Dask's HTTP server starts even without a dashboard, with neither key nor TLS: it is bound to loopback, and
DASK_SETTINGS leave it no routes."""
LOG_SETTINGS = {"PREFECT_LOGGING_EXTRA_LOGGERS": "sf_core,tasks,storage"}
"""Makes Prefect put the log lines of our packages into the log of the task or flow run."""
MAX_THREADS = 8
"""Upper bound of a worker's default threads: more lose time on models that fit on such a machine."""
START_TIMEOUT_S = 60.0


def worker_command(
    name: str, tags: Iterable[str], scheduler: Iterable[str], *, host: str = "127.0.0.1"
) -> list[str]:
    """The `dask worker` command; `scheduler` are the arguments that name the scheduler."""
    resources = " ".join([*(f"{tag}=1" for tag in tags), f"@{name}=1"])
    return [
        *python_module("dask", "worker", *scheduler, "--host", host),
        *("--name", name, "--resources", resources),
        *("--nthreads", "1", "--nworkers", "1", "--memory-limit", "0", *NO_DASHBOARD),
        *("--preload", "sf_core.scheduling.preload"),
        *("--preload-nanny", "sf_core.scheduling.template.nanny"),
    ]


def worker_environment(worker: WorkerConfig, measured: Device | None = None) -> dict[str, str]:
    """Environment of one worker beside DASK_SETTINGS. Raises ValueError for a missing or unknown device."""
    threads = str(worker_threads(worker))
    # the nanny would otherwise set these to 1
    environment = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    environment["CUDA_VISIBLE_DEVICES"] = _cuda_device(worker.device)
    device = measured or (find_device(worker.device_kind) if worker.device_kind else None)
    if device is not None:
        # in the environment, so that a worker that its nanny starts again has it too
        arguments = ["--device", json.dumps(asdict(device))]
        environment["DASK_DISTRIBUTED__WORKER__PRELOAD_ARGV"] = repr(arguments)
    return environment


def worker_threads(worker: WorkerConfig) -> int:
    return worker.threads or min(os.cpu_count() or 1, MAX_THREADS)


def become_worker(
    scheduler: str,
    worker: WorkerConfig,
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    probe: bool = False,
) -> None:
    """Turn this process into a worker of that scheduler; does not return.

    Raises ValueError, one sentence, if the scheduler does not answer or has a worker of that name, the device
    is not there, or others could reach the address without TLS: any peer of a Dask worker can run code in it.
    """
    worker = _on_a_device(worker)
    name = is_word(name or f"{socket.gethostname().partition('.')[0]}-{str(worker.device).replace(':', '')}")
    if probe and worker.device_kind:
        raise ValueError("--probe measures the device that --device-kind names: use only one of the two")
    require_tls(host, "worker")
    if not is_loopback(host) and not scheduler.startswith("tls://"):
        raise ValueError(f"other machines can reach {host}: use a tls:// scheduler, got {scheduler}")
    measured = None
    if probe:
        from sf_core.scheduling.probe import measure_device

        measured = measure_device(str(worker.device), threads=worker_threads(worker))
    own = worker_environment(worker, measured)
    if name in {worker.name for worker in read_workers(scheduler)}:
        raise ValueError(f"a worker named {name!r} is connected to {scheduler}; choose another --name")
    environment = {**LOG_SETTINGS, **module_environment(), **DASK_SETTINGS, **own}
    command = worker_command(name, worker.tags, [scheduler], host=host)
    command += ["--death-timeout", f"{START_TIMEOUT_S:.0f}"]
    os.execvpe(command[0], command, environment)


def _on_a_device(worker: WorkerConfig) -> WorkerConfig:
    """The worker with its device, by what this host has. Raises ValueError if there is more than one GPU to
    choose from."""
    device = worker.device or "cpu"
    if worker.device is None and COMPUTING & {*worker.tags} and (count := count_gpus()):
        if count > 1:
            raise ValueError(
                f"torch finds {count} GPUs here, but a worker uses one: choose --device cuda:N with N from "
                f"0 to {count - 1}, or --device cpu"
            )
        device = "cuda:0"
    return worker.model_copy(update={"device": device})


def _cuda_device(device: str | None) -> str:
    """Value of CUDA_VISIBLE_DEVICES for a device, whose number counts among those visible to this process."""
    if device is None or device == "cpu":
        return ""
    # seconds to import, and of use only where there is a GPU
    import torch

    number = int(device.removeprefix("cuda:"))
    count = torch.cuda.device_count()
    if number >= count:
        devices = f"torch {torch.__version__} finds {count} CUDA devices"
        raise ValueError(f"device {device} does not exist: {devices}")
    visible = visible_cuda_devices()
    return str(number) if visible is None else visible[number]
