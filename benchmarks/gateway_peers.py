"""The peers of benchmarks/gateway.py: LiteLLM's proxy and agent-lightning's LLM proxy, before one upstream.

Owns their environments and their start, as each one's documentation says, with one worker process. A
peer that cannot be installed or does not start raises StackError; its figures are left out with the reason.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import yaml

from benchmarks.gateway_client import Target
from sf_core.cli.stack.local import free_port
from sf_core.cli.stack.processes import Part
from sf_core.cli.stack.supervisor import StackError, Supervisor

VENVS = Path(__file__).resolve().parents[1] / ".venvs"
START_TIMEOUT_S = 120.0
NUM_ROLLOUTS = 256

QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    # no key is needed on loopback, and LiteLLM then skips the check too
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    # our own packages have other versions than the peer's environment
    "PYTHONPATH": "",
}

Models = list[dict[str, object]]
Peer = Callable[[Supervisor, Path, Models, int], list[str]]
"""(stack, scratch folder, LiteLLM model entries, port) -> chat paths, once it serves."""


def ensure_venv(name: str, packages: tuple[str, ...]) -> Path:
    """Python of an environment with these packages; made on the first call. Raises StackError."""
    folder = VENVS / name
    python = folder / "bin" / "python"
    marker = folder / ".complete.json"
    wanted = json.dumps(packages)
    if marker.exists() and marker.read_text(encoding="utf-8") == wanted:
        return python
    marker.unlink(missing_ok=True)
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", *packages],
    ):
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        if done.returncode:
            raise StackError(f"{name} cannot be installed: {done.stderr.strip()[-300:]}")
    # last, because the marker means that every package is installed
    marker.write_text(wanted, encoding="utf-8")
    return python


def litellm(stack: Supervisor, folder: Path, models: Models, port: int) -> list[str]:
    python = ensure_venv("litellm", ("litellm[proxy]==1.106.2",))
    config = folder / "litellm.yaml"
    config.write_text(
        yaml.safe_dump({"model_list": models, "litellm_settings": {"num_retries": 0}}), encoding="utf-8"
    )
    command = [str(python.with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--num_workers", "1"]
    [process] = stack.start(Part("litellm", command, QUIET, once=True))

    def ready() -> str | None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health/liveliness", timeout=2).is_success:
                return "ready"
        return None

    stack.await_ready(process, ready, START_TIMEOUT_S)
    return ["/v1/chat/completions"]


def agentlightning(stack: Supervisor, folder: Path, models: Models, port: int) -> list[str]:
    python = ensure_venv("agentlightning", ("agentlightning==0.3.0",))
    script = Path(__file__).parent / "peers" / "agentlightning_proxy.py"
    ready_file = folder / "agentlightning.json"
    ready_file.unlink(missing_ok=True)
    command = [str(python), str(script), str(port), str(NUM_ROLLOUTS), str(ready_file), json.dumps(models)]
    [process] = stack.start(Part("agentlightning", command, QUIET, once=True))
    text = stack.await_ready(
        process,
        lambda: ready_file.read_text(encoding="utf-8") if ready_file.exists() else None,
        START_TIMEOUT_S,
    )
    return [f"{path}/v1/chat/completions" for path in json.loads(text)]


PEERS: dict[str, Peer] = {"litellm": litellm, "agentlightning": agentlightning}


@contextlib.contextmanager
def running_peer(
    stack: Supervisor, folder: Path, name: str, upstream: tuple[str, int], delays_ms: tuple[int, ...]
) -> Iterator[dict[int, Target]]:
    """The peer's target for each token delay of its upstream. Raises StackError."""
    models: Models = [
        {
            "model_name": f"emulated-{delay}",
            "litellm_params": {
                "model": "openai/emulated",
                "api_base": f"http://{upstream[0]}:{upstream[1]}/{delay}/v1",
                "api_key": "none",
            },
        }
        for delay in delays_ms
    ]
    port = free_port()
    before = list(stack.processes.values())
    try:
        paths = PEERS[name](stack, folder, models, port)
        yield {delay: Target(("127.0.0.1", port), f"emulated-{delay}", paths) for delay in delays_ms}
    finally:
        for process in [process for process in stack.processes.values() if process not in before]:
            stack.remove(process)
