"""Status of runs, batches and evaluations as control routes answer it and live displays show it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from typing import Any, cast

from sf_core.config.rollout_config import failures_text
from sf_core.dataplane.api_schemas import RunStatus, Spent, Straggler
from sf_core.dataplane.runs.decide import Readiness, num_open_sessions, num_sessions_left
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.runs.run import ServedRun


def batch_status(run: ServedRun, batch: int) -> dict[str, Any]:
    ready = run.readiness(batch)
    return asdict(ready) | {"waiting_for": _say_awaited_groups(run, ready), **_workforce(run)}


def evaluation_status(run: ServedRun, group: Group) -> dict[str, Any]:
    missing = group.size - group.num_done
    sessions = f"{missing} of {group.size} held-out sessions are left" if missing else ""
    return {
        "done": not missing,
        "finished": group.num_done,
        "num_tasks": group.size,
        "waiting_for": _say_awaited(run, sessions),
        **_workforce(run),
    }


def run_status(run: ServedRun) -> RunStatus:
    ledger = run.state.ledger
    router = run.router
    recent = run.state.recent
    ready = run.readiness(ledger.next_batch)
    return {
        "run_id": run.spec.run_id,
        "run_dir": run.spec.run_dir,
        "attempt": run.spec.attempt,
        **cast(Any, run.stage),
        "version": router.weights.version,
        "next_batch": ledger.next_batch,
        "groups_accepted": ready.accepted,
        "groups_needed": ready.needed,
        "groups_in_flight": ready.in_flight,
        "tokens_left": _tokens_left(run),
        "waiting_for": _say_awaited_groups(run, ready),
        "sessions_running": len(run.sessions),
        "straggler": straggler(run),
        "work": work_of(run),
        "runners": {
            name: {
                "work": runner.work,
                "cpu_s": round(spent.cpu_s, 3),
                "num_ended": spent.num_ended,
            }
            for name, runner in run.runners.items()
            for spent in [runner.spent or Spent()]
        },
        "requests_waiting": len(router.waiting),
        "paused": None in router.paused,
        "released": run.released,
        "engines": [
            {
                "id": engine.engine_id,
                "worker": engine.worker,
                "version": engine.version,
                "state": engine.state,
                "running": len(engine.in_flight),
                "tokens": engine.num_tokens,
                "seconds": time.monotonic() - engine.serving_since if engine.serving_since else 0.0,
            }
            for engine in router.engines
        ],
        "tokens_total": run.meter.total,
        "tokens_per_second": run.meter.per_second(),
        "reward_recent": recent.mean_reward,
        "evaluations": {
            str(version): {"finished": group.num_done, "num_tasks": group.size}
            for version, group in ledger.evaluations.items()
        },
        "counters": {**run.counters, "interruptions": router.interruptions, "moves": router.moves},
        "last_error": recent.last_error,
    }


def _tokens_left(run: ServedRun) -> float | None:
    if (per_session := run.state.recent.mean_tokens) is None:
        return None
    return num_sessions_left(run.state.ledger) * per_session


def work_of(run: ServedRun) -> dict[str, int]:
    claimed = [session for session in run.sessions.values() if not session.is_external]
    answered = sum(session.answer is not None for session in claimed)
    return {
        "agent": len(claimed) - answered + num_open_sessions(run.state.ledger, run.memory.is_full),
        "reward": answered,
    }


def straggler(run: ServedRun) -> Straggler | None:
    """The session whose time is over first, which holds back its group. A batch takes other groups instead
    until that exceeds the lag bound (at once without overlap); then, with on_max_lag: wait, it waits for
    it."""
    counting = [session for session in run.sessions.values() if run.state.counts(session)]
    if not counting:
        return None
    oldest = min(counting, key=lambda session: (session.began_at, session.started_at))
    assert oldest.claim is not None
    slot = oldest.claim.slot
    return {
        "session": oldest.session_id,
        "group": slot.group if slot.split == "train" else None,
        "age_s": round(max(0.0, run.state.serving_s - oldest.began_at), 1),
    }


def num_runners(run: ServedRun) -> int:
    """Number of agent runners."""
    return run.runners.count("agent", run.spec.attempt)


def _workforce(run: ServedRun) -> dict[str, Any]:
    """Whether engines and runners work on what is waited for, and with what success."""
    return {
        # an engine that loads counts too: starting one may take any time
        "engines": len(run.router.engines),
        # None: external agents do all the work
        "runners": None if run.spec.rollout.is_external else num_runners(run),
        "failures_in_a_row": run.state.recent.failures_in_a_row,
        "released": run.released,
        "fault": run.fault,
    }


def _say_awaited_groups(run: ServedRun, ready: Readiness) -> str:
    what = ready.waiting_for
    if what and (dropped := Counter(run.state.ledger.rejected.values())):
        what += f"; {dropped.total()} dropped since the last batch: {failures_text(dropped)}"
    if what and run.memory.is_full:
        what += f"; {run.memory}, so groups start one at a time: raise --memory-mb"
    return _say_awaited(run, what)


def _say_awaited(run: ServedRun, what: str) -> str:
    """One sentence: what is waited for, and all that keeps it from coming; empty without a wait."""
    return "; ".join([what, *_obstacles(run)]) if what else ""


def _obstacles(run: ServedRun) -> list[str]:
    """What keeps sessions from finishing."""
    obstacles = [] if run.router.is_serving else [run.router.waiting_reason()]
    obstacles += [engine.refusal_reason for engine in run.router.engines if engine.refusal_reason]
    if not num_runners(run) and not run.spec.rollout.is_external:
        obstacles.append("no agent runner is connected")
    if run.spec.scored_apart and not run.runners.count("reward", run.spec.attempt):
        obstacles.append("no runner that scores and serves the judges is connected")
    if run.journal.failure is not None:
        obstacles.append(f"the journal cannot be written: {run.journal.failure}")
    if run.state.recent.last_error:
        obstacles.append(f"the last failed session: {run.state.recent.last_error}")
    return obstacles
