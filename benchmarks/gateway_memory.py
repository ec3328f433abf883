"""Memory of many sessions, with room for all of them and for a few. A section of benchmarks/gateway.py."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.gateway_client import Connection, Load, chat_body, converse
from benchmarks.gateway_stand import MODEL, Gateway, gateway
from sf_core.cli.stack.supervisor import Supervisor

ROOM_MB = 100_000
TOKENS_PER_TURN = 200
TOGETHER = 64
NUM_TIMED = 200

Line = dict[str, Any]


def memory(stack: Supervisor, folder: Path, sessions: int, turns: int, bound_mb: float) -> Line:
    """Play all sessions, `TOGETHER` at a time; then ask the first `NUM_TIMED` for two more turns.

    reload_ms_*: how much longer the first of these turns took than the second, with its session in memory."""
    line: Line = {"memory_sessions": sessions, "memory_turns": turns, "memory_bound_mb": bound_mb}
    for room_mb, name in ((ROOM_MB, "unbounded"), (bound_mb, "bounded")):
        with gateway(stack, folder, memory_mb=room_mb) as ours:
            figures = asyncio.run(_play(ours, name, sessions, turns))
        line |= {f"{name}_{key}": value for key, value in figures.items()}
    return line


async def _play(ours: Gateway, run_id: str, count: int, turns: int) -> Line:
    ours.register(run_id)
    await asyncio.to_thread(ours.connect, run_id, "e0", 0)
    before_mb = ours.rss_mb()
    load = Load(TOGETHER, TOKENS_PER_TURN, turns=turns)
    with ours.sessions(run_id, count) as session_ids:
        target = ours.target(session_ids)
        paths = iter(target.paths)

        async def agent() -> None:
            connection = await Connection.open(target.address)
            for path in paths:
                await converse(connection, target, load, path, "")
            connection.close()

        started = time.perf_counter()
        await asyncio.gather(*(agent() for _ in range(TOGETHER)))
        seconds = time.perf_counter() - started
        rss_mb = ours.rss_mb()
        first_ms, second_ms = await _ask_twice(target.address, target.paths[:NUM_TIMED])
        counted = _counted(ours)
    reload_ms = first_ms - second_ms
    return {
        "rss_mb": round(rss_mb, 1),
        "grown_mb": round(rss_mb - before_mb, 1),
        "counted_mb": round(counted["sf_memory_bytes"] / 2**20, 1),
        "turns_per_second": round(count * turns / seconds, 1),
        "spills": int(counted["sf_spills_total"]),
        "loads": int(counted["sf_loads_total"]),
        "reload_ms_p50": round(float(np.quantile(reload_ms, 0.5)), 2),
        "reload_ms_p99": round(float(np.quantile(reload_ms, 0.99)), 2),
    }


async def _ask_twice(address: tuple[str, int], paths: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds of the first and of the second additional turn of each session."""
    connection = await Connection.open(address)
    took_ms = np.zeros((2, len(paths)))
    for i, path in enumerate(paths):
        for nth, text in enumerate(("again", "and again")):
            started = time.perf_counter()
            status, answer = await connection.post(
                path, chat_body(MODEL, [{"role": "user", "content": text}], 5)
            )
            took_ms[nth, i] = 1000 * (time.perf_counter() - started)
            if status != 200:
                raise ValueError(f"status {status}: {answer[:200]!r}")
    connection.close()
    return took_ms[0], took_ms[1]


def _counted(ours: Gateway) -> dict[str, float]:
    families = text_string_to_metric_families(ours.http.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}
