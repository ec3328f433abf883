"""An emulated engine as a process that dials out to a data plane: `python -m benchmarks.gateway_engine`."""

from __future__ import annotations

import typer

from sf_core.dataplane.engine_client import serve_engine
from sf_core.engines.emulated import EmulatedEngine


def main(url: str, run_id: str, lease: str, token_delay_ms: float, max_running: int = 10_000) -> None:
    hello = {
        "run_id": run_id,
        "attempt": 1,
        "lease_id": lease,
        "epoch": 0,
        "engine_id": lease,
        "worker": lease,
        "max_running": max_running,
    }
    serve_engine(url, None, hello, lambda w: EmulatedEngine(token_delay_ms / 1000, version=w.version))


if __name__ == "__main__":
    typer.run(main)
