"""What the gateway costs, on two cores with client and engine included; one JSON line.

    python -m benchmarks.gateway                            everything, about ten minutes
    python -m benchmarks.gateway --only overhead --no-peers --seconds 3

Behind it is an emulated engine, a process of its own, whose only cost is the stated delay of a token.
Sessions are agents' sessions: every turn sends the whole history; they have 5 turns where not said otherwise,
and the first prompt is 40 tokens. Figures by section:

overhead     64 sessions, answers of 20 tokens, 10 ms each: overhead_ms_* = latency - 200 ms.
throughput   64 sessions, 20 tokens at once: requests_per_second, the client never waiting.
long         8 sessions, prompts of 4,000 tokens, 300 tokens with log-probs at once, one turn each.
             `floor_`, `litellm_`, `agentlightning_`: the same client and load against the minimal server
             (gateway_floor.py), and against the peers before it; `times_*` is our rate over theirs.
sessions     sessions open at once, their turns complete, rss_mb of the data plane with all of them.
memory       1,000 sessions with answers of 200 tokens: rss_mb of the data plane, and counted_mb of it.
turns        CPU of the data plane per turn at turn 200 over turn 10, 200 new tokens per turn.
streaming    every agent streams, in each of the four dialects (gateway_streams.py): tokens per second of wall
             time, and per second of the data plane's CPU.
interrupt    64 streams in flight: pause, resume, evacuation of the engine that holds all of them.
journal      turns written with fsync, and reading back a million tokens.
"""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from benchmarks import gateway_lives as lives
from benchmarks.gateway_client import Load, Measured, Target, measure
from benchmarks.gateway_memory import memory
from benchmarks.gateway_peers import PEERS, running_peer
from benchmarks.gateway_stand import floor_target, gateway, start_floor
from benchmarks.gateway_streams import stream_all
from sf_core.cli.stack.local import local_stack
from sf_core.cli.stack.supervisor import StackError, Supervisor

TOKEN_DELAY_MS = 10
NUM_TOKENS = 20

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    concurrency: int
    seconds: float
    sessions: int
    session_turns: int
    memory_sessions: int
    long_turns: int
    journal_turns: int
    streams: int = 256
    stream_tokens: int = 500
    stream_step_ms: float = 10.0


def main(
    only: Annotated[list[str] | None, typer.Option(help="sections; all by default")] = None,
    peers: bool = True,
    concurrency: int = 64,
    seconds: float = 10.0,
    sessions: int = 5000,
    session_turns: int = 20,
    memory_sessions: int = 1000,
    long_turns: int = 200,
    journal_turns: int = 5000,
    streams: int = 256,
    stream_tokens: int = 500,
    stream_step_ms: float = 10.0,
) -> None:
    unknown = set(only or ()) - set(SECTIONS)
    if unknown:
        raise typer.BadParameter(f"no such section: {sorted(unknown)}; there are {list(SECTIONS)}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sizes = Sizes(
        concurrency,
        seconds,
        sessions,
        session_turns,
        memory_sessions,
        long_turns,
        journal_turns,
        streams,
        stream_tokens,
        stream_step_ms,
    )
    line: Line = {"concurrency": concurrency}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with local_stack(folder / "logs", {"PYTHONPATH": str(Path.cwd())}) as stack:
            chosen = [name for name in SECTIONS if not only or name in only]
            for name in chosen:
                line |= SECTIONS[name](stack, folder, sizes)
            compared = [name for name in chosen if name in LOADS]
            if compared:
                line |= compare(stack, folder, sizes, compared, list(PEERS) if peers else [])
    for name in PEERS:
        for ours in [key for key in line if key.endswith("requests_per_second") and f"{name}_{key}" in line]:
            line[f"times_{name}_{ours}"] = round(line[ours] / line[f"{name}_{ours}"], 2)
    print(json.dumps(line))


LOADS: dict[str, tuple[int, Load]] = {
    "overhead": (TOKEN_DELAY_MS, Load(64, NUM_TOKENS)),
    "throughput": (0, Load(64, NUM_TOKENS)),
    "long": (0, Load(8, 300, turns=1, prompt_tokens=4000, logprobs=True)),
}
"""Delay of a token in milliseconds, and the load."""


def load_of(name: str, sizes: Sizes) -> Load:
    load = LOADS[name][1]
    return replace(load, concurrency=load.concurrency * sizes.concurrency // 64)


def measure_ours(name: str) -> Callable[[Supervisor, Path, Sizes], Line]:
    def section(stack: Supervisor, folder: Path, sizes: Sizes) -> Line:
        with gateway(stack, folder) as ours:
            ours.register(name)
            ours.connect(name, "e0", LOADS[name][0])
            # enough ids for every session to be new
            with ours.sessions(name, 10_000) as session_ids:
                before = ours.cpu_s()
                measured = run(ours.target(session_ids), load_of(name, sizes), sizes.seconds)
                cpu_ms = 1000 * (ours.cpu_s() - before) / max(measured.num_done, 1)
        return figures(name, measured) | {f"{name}_cpu_ms_per_request": round(cpu_ms, 3)}

    return section


def compare(stack: Supervisor, folder: Path, sizes: Sizes, names: list[str], peers: list[str]) -> Line:
    """The same loads on the minimal server, and on the peers with it as upstream."""
    address = start_floor(stack, folder)
    delays = tuple(sorted({LOADS[name][0] for name in names}))
    line: Line = {}
    for name in names:
        target = floor_target(address, LOADS[name][0])
        line |= prefixed("floor", figures(name, run(target, load_of(name, sizes), sizes.seconds)))
    for peer in peers:
        try:
            with running_peer(stack, folder, peer, address, delays) as targets:
                for name in names:
                    target = targets[LOADS[name][0]]
                    load = load_of(name, sizes)
                    # a warm-up: in the first seconds a peer still imports
                    run(target, load, sizes.seconds)
                    measured = run(target, load, sizes.seconds)
                    line |= prefixed(peer, figures(name, measured))
        except StackError as error:
            line[f"{peer}_left_out"] = str(error)[:300]
    return line


def run(target: Target, load: Load, seconds: float) -> Measured:
    return uvloop.run(measure(target, load, seconds))


def figures(name: str, measured: Measured) -> Line:
    line: Line = {}
    if name == "overhead":
        for share, label in ((0.5, "p50"), (0.99, "p99")):
            overhead = measured.quantile_ms(share) - NUM_TOKENS * TOKEN_DELAY_MS
            line[f"overhead_ms_{label}"] = round(overhead, 2)
    else:
        prefix = "" if name == "throughput" else f"{name}_"
        line[f"{prefix}requests_per_second"] = round(measured.per_second, 1)
        line[f"{prefix}latency_ms_p50"] = round(measured.quantile_ms(0.5), 2)
    if measured.num_errors:
        line[f"{name}_errors"] = measured.num_errors
        line[f"{name}_first_error"] = measured.first_error[:300]
    return line


def prefixed(prefix: str, line: Line) -> Line:
    return {f"{prefix}_{key}": value for key, value in line.items()}


def sessions_section(stack: Supervisor, folder: Path, sizes: Sizes) -> Line:
    with gateway(stack, folder) as ours:
        return uvloop.run(lives.many_sessions(ours, sizes.sessions, sizes.session_turns))


def memory_section(stack: Supervisor, folder: Path, sizes: Sizes) -> Line:
    return memory(stack, folder, sizes.memory_sessions, sizes.session_turns)


def turns_section(stack: Supervisor, folder: Path, sizes: Sizes) -> Line:
    with gateway(stack, folder) as ours:
        return uvloop.run(lives.long_sessions(ours, sizes.long_turns))


def streaming_section(stack: Supervisor, folder: Path, sizes: Sizes) -> Line:
    with gateway(stack, folder) as ours:
        return uvloop.run(stream_all(ours, sizes.streams, sizes.stream_tokens, sizes.stream_step_ms))


def interrupt_section(stack: Supervisor, folder: Path, sizes: Sizes) -> Line:
    with gateway(stack, folder) as ours:
        return uvloop.run(lives.interruptions(ours, sizes.concurrency))


def journal_section(stack: Supervisor, folder: Path, sizes: Sizes) -> Line:
    return asyncio.run(lives.journal(folder / "journal", sizes.journal_turns))


SECTIONS: dict[str, Callable[[Supervisor, Path, Sizes], Line]] = {
    **{name: measure_ours(name) for name in LOADS},
    "sessions": sessions_section,
    "memory": memory_section,
    "turns": turns_section,
    "streaming": streaming_section,
    "interrupt": interrupt_section,
    "journal": journal_section,
}

if __name__ == "__main__":
    typer.run(main)
