"""Memory of many sessions, and how much of it the data plane counts. A section of benchmarks/gateway.py."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.gateway_client import Connection, Load, converse
from benchmarks.gateway_stand import Gateway, gateway
from sf_core.cli.stack.supervisor import Supervisor

ROOM_MB = 100_000
TOKENS_PER_TURN = 200
TOGETHER = 64

Line = dict[str, Any]


def memory(stack: Supervisor, folder: Path, sessions: int, turns: int) -> Line:
    """Play all sessions, `TOGETHER` at a time."""
    line: Line = {"memory_sessions": sessions, "memory_turns": turns}
    with gateway(stack, folder, memory_mb=ROOM_MB) as ours:
        return line | asyncio.run(_play(ours, "memory", sessions, turns))


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
        counted = _counted(ours)
    return {
        "rss_mb": round(rss_mb, 1),
        "grown_mb": round(rss_mb - before_mb, 1),
        "counted_mb": round(counted["sf_memory_bytes"] / 2**20, 1),
        "turns_per_second": round(count * turns / seconds, 1),
    }


def _counted(ours: Gateway) -> dict[str, float]:
    families = text_string_to_metric_families(ours.http.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}
