"""Judges that a worker serves to itself: vLLM servers on its loopback, each with a key that only this process
knows. One that ends is started again, at the same address."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import httpx

from sf_core.config.rollout_config import JudgeConfig
from sf_core.engines.vllm.server import VllmServer, check_cpu_build
from sf_core.models.context import cache_bytes, longest_context
from sf_core.process.environment_variables import has_gpu, vllm_python
from sf_core.types import Endpoint
from sf_core.waits import waiting_for
from storage.files import join, read_bytes
from storage.json_files import load_json

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 1800.0
"""Longest start of a server."""

_POLL_S = 0.2

_MAX_FAILED_STARTS = 3
"""Number of failed starts after which a judge that has never served is given up."""

_RESTART_DELAY_S = 5.0
"""Seconds until a server that did not serve is started again."""

_MAX_KV_BYTES = 2**30
"""Most memory for KV on the CPU. If all calls need more, the server lets some of them wait."""

_GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that the judges of a worker take together."""


@contextmanager
def serve_judges(judges: Mapping[str, tuple[JudgeConfig, str]]) -> Iterator[dict[str, Endpoint]]:
    """Serve these judges, each with the folder of its model, until the block ends. Raises FileNotFoundError
    or ValueError, one sentence, if this worker has no vLLM for its device, RuntimeError if a server does not
    start."""
    if judges and not has_gpu():
        check_cpu_build(vllm_python())
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(JudgeServer(name, settings, folder, 1 / len(judges)))
            for name, (settings, folder) in judges.items()
        }
        for server in servers.values():
            server.await_start()
        yield {name: server.endpoint for name, server in servers.items()}


class JudgeServer:
    """Serves a judge as long as it is entered."""

    def __init__(self, name: str, settings: JudgeConfig, folder: str, share: float) -> None:
        """`share`: part of this worker's device that the judge may take."""
        self._name = name
        self._folder = folder
        # bound and never listened on: keeps the port for the servers, which may bind it too, as both reuse it
        self._port_holder = socket.socket()
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_holder.bind(("127.0.0.1", 0))
        host, port = self._port_holder.getsockname()
        self._health = f"http://{host}:{port}/health"
        self.endpoint = Endpoint(f"http://{host}:{port}/v1", secrets.token_urlsafe(), name)
        self._on_cpu = not has_gpu()
        # the context is as long as memory allows, and the folder's generation_config.json is ignored
        arguments = (
            f"--host={host} --port={port} --served-model-name={name} --max-num-seqs={settings.concurrency} "
            "--max-model-len=auto --generation-config=vllm --disable-uvicorn-access-log --disable-log-stats "
        )
        if self._on_cpu:
            kv_bytes = _count_kv_bytes(folder, settings.concurrency)
            arguments += f"--enforce-eager --kv-cache-memory-bytes={kv_bytes}"
        else:
            arguments += f"--gpu-memory-utilization={_GPU_MEMORY_SHARE * share:.3f}"
        self._arguments = arguments.split()
        self._has_served = threading.Event()
        self._is_closed = threading.Event()
        self._last_lines = ""
        self._supervisor = threading.Thread(target=self._supervise, name=f"judge-{name}", daemon=True)

    def __enter__(self) -> JudgeServer:
        self._supervisor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._supervisor.join()
        self._port_holder.close()

    def await_start(self) -> None:
        """Return once the judge answers. Raises RuntimeError if its server ends before."""
        with waiting_for(f"vLLM to serve the judge {self._name}", _START_TIMEOUT_S) as wait:
            while not self._has_served.wait(_POLL_S):
                if not self._supervisor.is_alive():
                    raise RuntimeError(
                        f"judge {self._name}: vLLM ended before it served {self._folder}:\n{self._last_lines}"
                    )
                wait.check()

    def _supervise(self) -> None:
        """Start the server again whenever it ends, until this judge is closed. Calls fail meanwhile, and are
        repeated."""
        num_failed = 0
        key = self.endpoint.api_key
        while not self._is_closed.is_set() and (self._has_served.is_set() or num_failed < _MAX_FAILED_STARTS):
            server = VllmServer(self._folder, self._arguments, on_cpu=self._on_cpu, key=key)
            try:
                has_served = self._watch(server)
                self._last_lines = server.last_lines()
            finally:
                server.end()
            if not self._is_closed.is_set():
                log.warning("judge %s: the vLLM of this judge has ended:\n%s", self._name, self._last_lines)
            if not has_served:
                num_failed += 1
                self._is_closed.wait(_RESTART_DELAY_S)

    def _watch(self, server: VllmServer) -> bool:
        """Return once the server has ended, does not start in time, or this judge is closed. True if the
        server has served."""
        has_served = False
        deadline = time.monotonic() + _START_TIMEOUT_S
        with httpx.Client(timeout=10, trust_env=False) as http:
            while not server.has_ended and (has_served or time.monotonic() < deadline):
                if not has_served:
                    with suppress(httpx.HTTPError):
                        has_served = http.get(self._health).status_code == 200
                if has_served:
                    self._has_served.set()
                if self._is_closed.wait(_POLL_S):
                    break
        return has_served


def _count_kv_bytes(folder: str, num_calls: int) -> int:
    """Memory for the KV of so many calls, each as long as the model's context, as far as it is given."""
    shape = load_json(read_bytes(join(folder, "config.json")))
    length = longest_context(shape) or 2**15
    # one more: vLLM keeps a block for itself
    needed = cache_bytes(shape, num_calls + 1, length)
    return _MAX_KV_BYTES if needed is None else min(needed, _MAX_KV_BYTES)
