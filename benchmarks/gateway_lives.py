"""Figures of a run's life rather than of a request: many sessions, long ones, interruptions, the journal.
Sections of benchmarks/gateway.py; each returns its figures."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gateway_client import (
    Connection,
    Load,
    answer_text,
    chat_body,
    content_of,
    converse,
    streamed_content,
)
from benchmarks.gateway_stand import MODEL, Gateway
from sf_core.config import RunConfig
from sf_core.dataplane.api_schemas import RunRollout, RunSpec
from sf_core.dataplane.chat.messages import assistant_message
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.runs.events import OpenedSession
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.turn_events import Begun, NewPrompt, TurnEnded, TurnKey
from sf_core.models.builtin import make_policy
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling

TOKEN_DELAY_MS = 10
TOKENS_PER_TURN = 200
TURNS_PER_SESSION = 10

Line = dict[str, Any]


async def many_sessions(gateway: Gateway, count: int, turns: int) -> Line:
    """Run all sessions at once, each on its own connection, 20 tokens a turn; then report all."""
    gateway.register("sessions")
    await asyncio.to_thread(gateway.connect, "sessions", "e0", TOKEN_DELAY_MS)
    load = Load(count, 20, turns=turns)
    before_mb = gateway.rss_mb()
    with gateway.sessions("sessions", count) as session_ids:
        target = gateway.target(session_ids)
        connections = [await Connection.open(target.address) for _ in session_ids]
        started = time.perf_counter()
        done = await asyncio.gather(
            *(
                converse(connection, target, load, path, "")
                for connection, path in zip(connections, target.paths, strict=True)
            ),
            return_exceptions=True,
        )
        seconds = time.perf_counter() - started
        rss_mb = gateway.rss_mb()
        for connection in connections:
            connection.close()
        failed = [error for error in done if isinstance(error, BaseException)]
        started = time.perf_counter()
        finished = await asyncio.to_thread(_finish, gateway, session_ids)
        finish_s = time.perf_counter() - started
    line: Line = {
        "sessions_open": count,
        "sessions_complete": finished - len(failed),
        "sessions_turns": turns,
        "sessions_seconds": round(seconds, 1),
        "sessions_turns_per_second": round(count * turns / seconds, 1),
        "sessions_errors": len(failed),
        "sessions_finished_per_second": round(finished / finish_s, 1),
        "rss_mb": round(rss_mb, 1),
        "rss_kb_per_session": round(1024 * (rss_mb - before_mb) / count, 1),
    }
    return line | ({"sessions_first_error": str(failed[0])[:300]} if failed else {})


def _finish(gateway: Gateway, session_ids: list[str], together: int = 100) -> int:
    """Report every session as a runner does; returns how many the data plane has on disk."""
    finished = 0
    for start in range(0, len(session_ids), together):
        reports = [
            {"session_id": name, "status": "finished", "reward": 1.0}
            for name in session_ids[start : start + together]
        ]
        finished += len(gateway.post("/runs/sessions/finished", sessions=reports)["finished"])
    return finished


async def long_sessions(gateway: Gateway, turns: int, count: int = 8, window: int = 10) -> Line:
    """CPU of the data plane per turn: means over `window` turns of `count` sessions served in turn."""
    gateway.register("turns")
    await asyncio.to_thread(gateway.connect, "turns", "e0", 0)
    sampled = TOKENS_PER_TURN - 10
    expected = answer_text(sampled)
    cpu_ms = np.zeros(turns)
    with gateway.sessions("turns", count) as session_ids:
        target = gateway.target(session_ids)
        connection = await Connection.open(target.address)
        histories: list[list[dict[str, str]]] = [[] for _ in session_ids]
        for turn in range(turns):
            before = gateway.cpu_s()
            for path, messages in zip(target.paths, histories, strict=True):
                messages.append({"role": "user", "content": "go on"})
                status, answer = await connection.post(
                    path, chat_body(MODEL, messages, sampled), target.key(path)
                )
                if status != 200 or content_of(answer) != expected:
                    raise ValueError(f"turn {turn}: status {status}: {answer[:200]!r}")
                messages.append({"role": "assistant", "content": expected})
            cpu_ms[turn] = 1000 * (gateway.cpu_s() - before) / count
        connection.close()
    early = cpu_ms[10 - window // 2 : 10 + window // 2].mean()
    late = cpu_ms[-window:].mean()
    return {
        "turn_cost_ratio": round(late / early, 2),
        "turn_10_cpu_ms": round(early, 3),
        f"turn_{turns}_cpu_ms": round(late, 3),
    }


async def interruptions(gateway: Gateway, num_streams: int, num_tokens: int = 800) -> Line:
    """Pause and resume streams on one engine, then evacuate it, so that another one continues them.

    pause_ms: until no stream gets a token any more. resume_ms, evacuate_gap_ms: until every stream gets one
    again. evacuate_ms: until the engine has yielded.
    """
    gateway.register("interrupt")
    await asyncio.to_thread(gateway.connect, "interrupt", "e0", TOKEN_DELAY_MS)
    with gateway.sessions("interrupt", num_streams) as session_ids:
        target = gateway.target(session_ids)
        streams = [await Connection.open(target.address) for _ in session_ids]
        body = chat_body(MODEL, [{"role": "user", "content": "go"}], num_tokens, stream=True)
        answers = [
            asyncio.ensure_future(stream.post(path, body, target.key(path)))
            for stream, path in zip(streams, target.paths, strict=True)
        ]
        await asyncio.sleep(0.5)
        await _all_again(streams, time.perf_counter())
        pause_ms, resume_ms = await _pause(gateway, streams)
        await asyncio.to_thread(gateway.connect, "interrupt", "e1", TOKEN_DELAY_MS)
        evacuate_ms, gap_ms = await _evacuate(gateway, streams)
        replies = await asyncio.gather(*answers)
        for stream in streams:
            stream.close()
    expected = answer_text(num_tokens)
    texts = [streamed_content(body) for _, body in replies]
    return {
        "in_flight": num_streams,
        "pause_ms": round(pause_ms, 1),
        "resume_ms": round(resume_ms, 1),
        "evacuate_ms": round(evacuate_ms, 1),
        "evacuate_gap_ms": round(gap_ms, 1),
        "tokens_lost": sum(max(len(expected) - len(text), 0) for text in texts),
        "tokens_repeated": sum(max(len(text) - len(expected), 0) for text in texts),
        "answers_wrong": sum(text != expected for text in texts),
    }


async def _pause(gateway: Gateway, streams: list[Connection]) -> tuple[float, float]:
    started = time.perf_counter()
    await asyncio.to_thread(gateway.post, "/runs/interrupt/pause")
    answered = time.perf_counter()
    await asyncio.sleep(0.3)
    last = max(max(stream.arrivals) for stream in streams)
    resumed = time.perf_counter()
    await asyncio.to_thread(gateway.post, "/runs/interrupt/resume")
    return 1000 * (max(last, answered) - started), await _all_again(streams, resumed)


async def _evacuate(gateway: Gateway, streams: list[Connection]) -> tuple[float, float]:
    started = time.perf_counter()
    await asyncio.to_thread(gateway.post, "/runs/interrupt/leases/e0/revoke")
    evacuated = time.perf_counter()
    return 1000 * (evacuated - started), await _all_again(streams, evacuated, since=started)


async def _all_again(streams: list[Connection], after: float, since: float | None = None) -> float:
    """Milliseconds from `since` until every stream has data newer than `after`. Raises TimeoutError."""
    firsts: dict[int, float] = {}
    async with asyncio.timeout(30):
        while len(firsts) < len(streams):
            await asyncio.sleep(0.002)
            for i, stream in enumerate(streams):
                if i not in firsts and stream.arrivals and stream.arrivals[-1] > after:
                    firsts[i] = next(at for at in stream.arrivals if at > after)
    return 1000 * (max(firsts.values()) - (after if since is None else since))


async def journal(folder: Path, turns: int, concurrency: int = 64) -> Line:
    """Record turns of 200 tokens, ten to a session, in `concurrency` sessions at once; each turn waits for
    its fsync. Then open the run again from its journal."""
    make_policy(str(folder / "model"), RunConfig().policy, seed=0)
    plane = DataPlane(DataplaneOptions(str(folder / "plane")))
    run = await plane.register(_journaled_run(folder))
    numbers = iter(range(-(-turns // TURNS_PER_SESSION)))

    async def play() -> None:
        for number in numbers:
            await _record_session(run, f"journal.{number}")

    started = time.perf_counter()
    await asyncio.gather(*(play() for _ in range(concurrency)))
    seconds = time.perf_counter() - started
    await plane.close()
    started = time.perf_counter()
    reopened = DataPlane(DataplaneOptions(str(folder / "plane")))
    await reopened.reopen()
    recovery_s = time.perf_counter() - started
    turns_read = [turn for s in reopened.runs["journal"].sessions.values() for turn in s.turns]
    num_tokens = sum(len(turn.ids) for turn in turns_read)
    await reopened.close()
    return {
        "journal_turns_per_second": round(len(turns_read) / seconds, 1),
        "journal_writers": concurrency,
        "recovery_seconds": round(recovery_s * 1_000_000 / num_tokens, 3),
        "recovery_tokens_read": num_tokens,
    }


async def _record_session(run: ServedRun, session_id: str) -> None:
    [session] = run.open([OpenedSession(session_id)])
    await run.journal.flush()
    ids = [7]
    for _ in range(TURNS_PER_SESSION):
        prompt = session.open_prompt_from_ids([*ids, 8])
        key = TurnKey(session.session_id, prompt.index, session.begin_sample(prompt, 0))
        request = GenerationRequest("r", prompt.full_ids(), 0, 2**20, (), Sampling())
        generation = Generation(request, floor=0)
        sampled = list(range(TOKENS_PER_TURN))
        chunk = Chunk("r", sampled, [-0.5] * TOKENS_PER_TURN, 0, FinishReason.STOP)
        generation.append(chunk, "e0")
        message = assistant_message("", [], session.turn_id(prompt, key.sample))
        turn = session.commit(generation, prompt, key.sample, message, 0)
        prompts = [NewPrompt.from_prompt(prompt) for prompt in session.pop_unrecorded_prompts()]
        run.journal.append_later(Begun(key, 0, b"", prompts))
        await run.journal.append(TurnEnded.from_turn(key, turn, 0))
        ids = [*prompt.full_ids(), *sampled]


def _journaled_run(folder: Path) -> RunSpec:
    return RunSpec(
        run_id="journal",
        run_dir=str(folder / "run"),
        model_dir=str(folder / "model"),
        seed=0,
        rollout=RunRollout(
            group_size=1, groups_per_batch=1, max_tokens=TOKENS_PER_TURN, session_timeout_s=600.0
        ),
        lag_bound=1,
        context_length=2**20,
        num_batches=1,
        iteration=0,
        version=0,
        weights_uri="unused",
        done_groups=[],
        attempt=1,
    )
