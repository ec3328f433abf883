"""The environment variables that this process reads, and the GPUs that it was given. Other modules are passed
the values of variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from sf_core.process.import_path import ROOT

STACK_FOLDER = Path(".stack")
"""Folder of a stack that stays, below that in which `sf up` is called, if none is named."""


def configured_dataplane_key() -> str | None:
    """Key of the data plane that the user chose (SF_DATAPLANE_KEY), if any."""
    return os.environ.get("SF_DATAPLANE_KEY") or None


def run_key() -> str | None:
    """Key of the run that this process starts (SF_RUN_KEY). Only the flow needs it, to register the run."""
    return os.environ.get("SF_RUN_KEY") or None


def judge_key(name: str) -> str:
    """Key of a judge at a URL (SF_JUDGE_KEY_NAME, with its name in capitals); empty without one."""
    return os.environ.get(f"SF_JUDGE_KEY_{name.upper()}", "")


def openai_key() -> str | None:
    """Key of an endpoint elsewhere that an agent is tried with."""
    return os.environ.get("OPENAI_API_KEY") or None


def cache_dir() -> Path:
    """Folder of warm-started and fetched policies, kept between runs (SF_CACHE_DIR, else the user's cache
    folder)."""
    if path := os.environ.get("SF_CACHE_DIR"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seamlessflow"


def dataplane_url() -> str | None:
    """URL of the data plane (SF_DATAPLANE_URL), for configurations that name none."""
    return os.environ.get("SF_DATAPLANE_URL") or None


def scheduler_address() -> str | None:
    """Address of the Dask scheduler (SF_SCHEDULER), for configurations that name none."""
    return os.environ.get("SF_SCHEDULER") or None


def hub_endpoint() -> str | None:
    """URL of the Hugging Face Hub (HF_ENDPOINT), if it is not the public one."""
    return os.environ.get("HF_ENDPOINT") or None


def own_workers() -> frozenset[str] | None:
    """Names of the workers of a Dask scheduler that a run may use (SF_WORKERS, separated by commas), as the
    others belong to other runs; None: it may use all."""
    names = frozenset(name.strip() for name in os.environ.get("SF_WORKERS", "").split(",") if name.strip())
    return names or None


def prefect_api_url() -> str | None:
    """URL of the Prefect API that the user chose (PREFECT_API_URL), if any."""
    return os.environ.get("PREFECT_API_URL") or None


def prefect_password() -> str | None:
    """USER:PASSWORD that a Prefect server requires (PREFECT_SERVER_API_AUTH_STRING), if any. Its clients send
    PREFECT_API_AUTH_STRING."""
    return os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or None


def allowed_hosts() -> list[str]:
    """Further addresses, HOST or HOST:PORT, at which browsers and clients may use our servers
    (SF_ALLOWED_HOSTS, separated by commas)."""
    return [host.strip() for host in os.environ.get("SF_ALLOWED_HOSTS", "").split(",") if host.strip()]


def command_started_at() -> float | None:
    """Unix time at which the command that started this flow was called (SF_STARTED_AT), so that its start-up
    is counted; None for a deployment."""
    value = os.environ.get("SF_STARTED_AT")
    return float(value) if value else None


def flow_folder() -> str | None:
    """Working directory of the flows of a stack that stays (SF_FLOW_FOLDER), where `sf up` was called."""
    return os.environ.get("SF_FLOW_FOLDER") or None


def computes_nothing() -> bool:
    """Whether workers start without the compute libraries (SF_EMULATED=1), as those of emulated runs do."""
    return os.environ.get("SF_EMULATED") == "1"


def vllm_python() -> str:
    """Python of the environment that has vLLM (SF_VLLM_PYTHON, else that of `make vllm`). Raises
    FileNotFoundError, one sentence, if it is not there."""
    python = os.environ.get("SF_VLLM_PYTHON") or str(ROOT / ".venvs" / "vllm" / "bin" / "python")
    if not os.access(python, os.X_OK):
        raise FileNotFoundError(
            f"engine.kind: vllm and environment.judges.NAME.model need a Python with vLLM, but {python} "
            "does not exist: run `make vllm` in a clone, or set SF_VLLM_PYTHON to another Python"
        )
    return python


def teacher_key() -> str | None:
    """Key of the server that `train.teacher.url` names (SF_TEACHER_KEY)."""
    return os.environ.get("SF_TEACHER_KEY") or None


_NOT_INHERITED = re.compile(
    # another Python: our import path is not for it
    r"PYTHON(PATH|HOME)"
    # ours, but for the mark by which a stack finds and ends its processes
    r"|(?!SF_STACK$)(SF|PREFECT|DASK|AWS)_.*"
    # keys of whatever else; with VLLM_API_KEY a vLLM server would refuse us
    r"|.*(KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)S?(_.*)?|SSH_AUTH_SOCK",
    re.IGNORECASE,
)


def select_inherited() -> dict[str, str]:
    """The variables for programs of others that this process starts: neither our settings nor keys."""
    return {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}


def prefect_home() -> Path:
    """Folder of Prefect's database (PREFECT_HOME, else ~/.prefect)."""
    return Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")


def reach_directly(*urls: str | None) -> None:
    """Exempt this machine and these servers from the proxies of the environment, for this process and its
    children (NO_PROXY): no proxy reaches them, and most proxies take long to report that."""
    if not urllib.request.getproxies():
        return
    hosts = ["127.0.0.1", "localhost", "::1", *(urlsplit(url).hostname or "" for url in urls if url)]
    named = f"{os.environ.get('NO_PROXY', '')},{os.environ.get('no_proxy', '')}"
    excepted = ",".join(filter(None, dict.fromkeys([*map(str.strip, named.split(",")), *hosts])))
    # some libraries read only one of the two
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = excepted


def visible_cuda_devices() -> list[str] | None:
    """The CUDA devices given to this process, by a batch system for example; None if all of them."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]


def has_gpu() -> bool:
    """Whether this process was given a GPU, as far as can be told without a tensor library."""
    devices = visible_cuda_devices()
    return shutil.which("nvidia-smi") is not None if devices is None else bool(devices)


def count_gpus() -> int:
    """Number of GPUs that torch finds for this process; 0 with SF_DEVICE=cpu."""
    if os.environ.get("SF_DEVICE") == "cpu" or not has_gpu():
        return 0
    # seconds to import, and of use only where there is a GPU
    import torch

    return torch.cuda.device_count()


def gpu_memory(number: int) -> int | None:
    """Memory of a GPU in bytes, None if nvidia-smi does not tell: to ask torch takes some of it."""
    visible = visible_cuda_devices()
    query = ["--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        command = ["nvidia-smi", f"--id={visible[number] if visible else number}", *query]
        said = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
        return int(said.stdout) << 20
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


PREFECT_HOME = ("PREFECT_HOME", "where Prefect keeps its database")


CACHE_DIR = ("SF_CACHE_DIR", "where policies are kept that were warm-started or downloaded")


def check_place(folder: Path, variable: str, purpose: str) -> None:
    """Raises OSError, one sentence, if files cannot be written into the folder that this environment variable
    sets."""
    if reason := why_not_writable(folder):
        raise OSError(f"{folder}, {purpose}, cannot be written ({reason}): set {variable} to another folder")


def why_not_writable(folder: Path) -> str | None:
    """Reason of the system why files cannot be created in the folder, else None. Creates the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return str(error.strerror)
    return None
