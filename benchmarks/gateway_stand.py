"""The processes around the measured gateway: our data plane and engines, and the minimal server; and a model
folder whose tokens are characters."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.gateway_client import Target
from sf_core.cli.stack.local import start_dataplane
from sf_core.cli.stack.processes import Part
from sf_core.cli.stack.supervisor import Process, Supervisor
from sf_core.config import RunConfig
from sf_core.dataplane.operator_key import operator_key
from sf_core.dataplane.options import DataplaneOptions
from sf_core.models.builtin import make_policy

MODEL = "policy"
GROUP_SIZE = 50
KEEP_ALIVE_S = 5.0


@dataclass
class Gateway:
    """Our data plane, with one run per load, so that loads share no sessions."""

    stack: Supervisor
    folder: Path
    process: Process
    http: httpx.Client
    engines: dict[str, Process] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    """Keys of the claimed sessions, which agents get."""

    @property
    def address(self) -> tuple[str, int]:
        return self.http.base_url.host, int(self.http.base_url.port or 80)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        return dict(self.http.post(path, json=body).raise_for_status().json())

    def register(self, run_id: str, **rules: Any) -> None:
        self.post(
            "/runs",
            run_id=run_id,
            run_dir=str(self.folder / run_id),
            model_dir=str(self.folder / "model"),
            served_model=MODEL,
            seed=0,
            rollout={
                "group_size": GROUP_SIZE,
                "groups_per_batch": 1000,
                "max_tokens": 100_000,
                "session_timeout_s": 1e6,
                **rules,
            },
            lag_bound=0,
            context_length=1_000_000,
            num_batches=1,
            iteration=0,
            version=0,
            weights_uri="unused",
            done_groups=[],
            attempt=1,
        )

    def connect(self, run_id: str, lease: str, token_delay_ms: float, *, stepping: bool = False) -> None:
        """Start an emulated engine, or a SteppingEngine; returns when the data plane may use it."""
        module = [sys.executable, "-m", "benchmarks.gateway_engine"]
        command = [*module, str(self.http.base_url), run_id, lease, str(token_delay_ms)]
        command += ["--stepping"] if stepping else []
        [process] = self.stack.start(Part(f"engine-{run_id}-{lease}", command, once=True))
        self.engines[lease] = process

        def serving() -> str | None:
            engines = self.http.get(f"/runs/{run_id}").json()["engines"]
            return lease if any(e["id"] == lease and e["version"] is not None for e in engines) else None

        self.stack.await_ready(process, serving, 30.0)

    @contextlib.contextmanager
    def sessions(self, run_id: str, count: int) -> Iterator[list[str]]:
        """Ids of claimed sessions, which the run keeps as long as the context lasts; then it is released."""
        claimed = self.post(f"/runs/{run_id}/claim", runner="load", max=count, running=[])["sessions"]
        ids = [session["session_id"] for session in claimed]
        self.keys |= {session["session_id"]: session["key"] for session in claimed}
        done = threading.Event()

        def keep_alive() -> None:
            while not done.wait(KEEP_ALIVE_S):
                self.post(f"/runs/{run_id}/claim", runner="load", max=0, running=ids)

        keeper = threading.Thread(target=keep_alive, daemon=True)
        keeper.start()
        try:
            yield ids
        finally:
            done.set()
            keeper.join()
            self.post(f"/runs/{run_id}/release")

    def target(self, session_ids: list[str]) -> Target:
        keys = {f"/sessions/{name}/v1/chat/completions": self.keys[name] for name in session_ids}
        return Target(self.address, MODEL, list(keys), keys)

    def cpu_s(self) -> float:
        """CPU seconds so far of the data plane, in ns steps."""
        tasks = Path(f"/proc/{self.process.pid()}/task").glob("*/schedstat")
        return sum(int(task.read_text(encoding="utf-8").split()[0]) for task in tasks) / 1e9

    def rss_mb(self) -> float:
        return float(psutil.Process(self.process.pid()).memory_info().rss / 2**20)


@contextlib.contextmanager
def gateway(
    stack: Supervisor, folder: Path, memory_mb: float = DataplaneOptions.memory_mb
) -> Iterator[Gateway]:
    if not (folder / "model").exists():
        shape = {"hidden_size": 32, "num_layers": 1}
        make_policy(str(folder / "model"), RunConfig().policy.model_copy(update=shape), seed=0)
    url = start_dataplane(stack, folder, memory_mb=memory_mb)()
    process = stack.processes["dataplane"]
    headers = {"Authorization": f"Bearer {operator_key(url)}"}
    with httpx.Client(base_url=url, headers=headers, timeout=120) as http:
        running = Gateway(stack, folder, process, http)
        yield running
        for part in [*running.engines.values(), process]:
            stack.remove(part)


def start_floor(stack: Supervisor, folder: Path) -> tuple[str, int]:
    """Start the minimal server; returns its address."""
    port_file = folder / "floor.port"
    command = [sys.executable, "-m", "benchmarks.gateway_floor", str(port_file)]
    [process] = stack.start(Part("floor", command, once=True))
    port = stack.await_ready(
        process, lambda: port_file.read_text(encoding="utf-8") if port_file.exists() else None, 30.0
    )
    return "127.0.0.1", int(port)


def floor_target(address: tuple[str, int], token_delay_ms: int) -> Target:
    return Target(address, MODEL, [f"/{token_delay_ms}/v1/chat/completions"])
