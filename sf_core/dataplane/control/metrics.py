"""Prometheus metrics of runs, sessions and memory. Owns their names, labels and meaning.

They are figures that the data plane keeps anyway, read when Prometheus scrapes them; what is only counted for
Prometheus, once per request, is in gateway/observed.py.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sf_core.config.rollout_config import REASONS
from sf_core.dataplane.routing.connection import EngineState
from sf_core.dataplane.runs.results import NUM_RECENT
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from sf_core.recipes.gates import Kind

_BRANCH = "branches."
_REJECTED = "rejected_groups."
"""Prefixes of those counters of a run whose names end with a reason."""

_ENDS = {
    "finished": "finished_sessions",
    "failed": "failed_sessions",
    "lost": "retries",
    "cut": "surplus_sessions",
}
"""Counters of a run for the ends of claimed sessions, by label."""


class PlaneMetrics(Collector):
    """Metrics of a data plane and all its runs. A released run has no gauges, which would stand still as if
    it hung. Its counters stay, or sums over runs would fall."""

    def __init__(self, runs: Mapping[str, ServedRun], memory: MemoryBudget) -> None:
        self._runs = runs
        self._memory = memory

    def collect(self) -> Iterable[Metric]:
        per_run = ["run"]
        waiting = GaugeMetricFamily("sf_requests_waiting", "Turns that wait for an engine.", labels=per_run)
        running = GaugeMetricFamily("sf_requests_running", "Turns that engines work on.", labels=per_run)
        sessions = GaugeMetricFamily(
            "sf_sessions_running", "Open sessions, with or without a runner.", labels=per_run
        )
        version = GaugeMetricFamily("sf_policy_version", "Last published version.", labels=per_run)
        answers = GaugeMetricFamily(
            "sf_answers_unscored", "Sessions with an answer but no reward yet.", labels=per_run
        )
        reward = GaugeMetricFamily(
            "sf_reward_recent", f"Mean reward of the last {NUM_RECENT} finished sessions.", labels=per_run
        )
        engines = GaugeMetricFamily("sf_engines", "Connected engines.", labels=["run", "state"])
        tokens = CounterMetricFamily("sf_sampled_tokens", "Tokens that engines sampled.", labels=per_run)
        interruptions = CounterMetricFamily(
            "sf_interruptions", "Number of times that a turn continued on another engine.", labels=per_run
        )
        moves = CounterMetricFamily(
            "sf_moves", "Turns moved to another engine because a queue was too long.", labels=per_run
        )
        carried = CounterMetricFamily(
            "sf_engine_bytes", "Bytes of frames to and from engines.", labels=["run", "direction"]
        )
        for name, run in list(self._runs.items()):
            router = run.router
            if not run.released:
                waiting.add_metric([name], len(router.waiting))
                running.add_metric([name], sum(len(engine.in_flight) for engine in router.engines))
                sessions.add_metric([name], len(run.sessions))
                answers.add_metric([name], sum(s.answer is not None for s in run.sessions.values()))
                version.add_metric([name], router.weights.version)
                if (mean := run.state.recent.mean_reward) is not None:
                    reward.add_metric([name], mean)
                states = Tally(engine.state for engine in router.engines)
                # zeros too: an alert on too few engines must see a run that has none
                for state in get_args(EngineState):
                    engines.add_metric([name, state], states[state])
            tokens.add_metric([name], run.meter.total)
            interruptions.add_metric([name], router.interruptions)
            moves.add_metric([name], router.moves)
            carried.add_metric([name, "to_engines"], router.bytes_to_engines)
            carried.add_metric([name, "from_engines"], router.bytes_from_engines)
        gauges = [waiting, running, sessions, answers, version, reward, engines]
        counters = [*_ends(self._runs), tokens, interruptions, moves, _branches(self._runs), carried]
        counters += _choices(self._runs)
        return [*gauges, *counters, *_journals(self._runs), *_memory_use(self._memory)]


def _memory_use(memory: MemoryBudget) -> Iterable[Metric]:
    held = GaugeMetricFamily(
        "sf_memory_bytes", "Approximate memory of sessions and results.", memory.num_bytes
    )
    bound = GaugeMetricFamily(
        "sf_memory_bound_bytes",
        "Memory above which groups start one at a time and external sessions are refused.",
        memory.bound_bytes,
    )
    return [held, bound]


def _journals(runs: Mapping[str, ServedRun]) -> Iterable[Metric]:
    unwritable = GaugeMetricFamily(
        "sf_journal_unwritable",
        "1 while a journal cannot be written, with the reason.",
        labels=["run", "reason"],
    )
    failures = CounterMetricFamily(
        "sf_journal_failures", "Number of times that writing a journal failed.", labels=["run"]
    )
    for name, run in list(runs.items()):
        if (failure := run.journal.failure) is not None:
            unwritable.add_metric([name, failure.strerror or str(failure)], 1)
        failures.add_metric([name], run.journal.num_failures)
    return [unwritable, failures]


def _ends(runs: Mapping[str, ServedRun]) -> list[Metric]:
    sessions = CounterMetricFamily(
        "sf_sessions", "Sessions given to runners, by the way they ended.", labels=["run", "end"]
    )
    groups = CounterMetricFamily(
        "sf_groups", "Groups sealed in a batch, or rejected, by reason.", labels=["run", "end"]
    )
    failures = CounterMetricFamily(
        "sf_failures",
        "Failed sessions by reason, retried sessions included.",
        labels=["run", "reason"],
    )
    for name, run in list(runs.items()):
        for end, counter in _ENDS.items():
            sessions.add_metric([name, end], run.counters[counter])
        for failed in REASONS:
            failures.add_metric([name, failed], run.counters[f"failures.{failed}"])
        groups.add_metric([name, "sealed"], run.counters["sealed_groups"])
        for reason, number in _by_reason(run, _REJECTED).items():
            groups.add_metric([name, reason], number)
    return [sessions, groups, failures]


def _choices(runs: Mapping[str, ServedRun]) -> list[Metric]:
    """What runs that choose their tasks and groups have sampled."""
    judged = CounterMetricFamily(
        "sf_judged_groups",
        "Completed or dropped groups by the share of right sessions: all (right), some (mixed) or none "
        "(wrong). Only for runs with a gate, a curriculum, spare sessions or least sessions.",
        labels=["run", "kind"],
    )
    repeated = CounterMetricFamily(
        "sf_repeated_tasks",
        "Groups whose task was in flight or not useful, because the curriculum had no other task.",
        labels=["run"],
    )
    cut = CounterMetricFamily(
        "sf_cut_tokens",
        "Tokens of sessions that were stopped because their group was complete.",
        labels=["run"],
    )
    for name, run in list(runs.items()):
        repeated.add_metric([name], run.state.ledger.tasks.num_repeated)
        cut.add_metric([name], run.counters["surplus_tokens"])
        for kind in get_args(Kind):
            judged.add_metric([name, kind], run.counters[f"groups.{kind}"])
    return [judged, repeated, cut]


def _branches(runs: Mapping[str, ServedRun]) -> CounterMetricFamily:
    branches = CounterMetricFamily(
        "sf_branches", "Branches by the reason why they were opened.", labels=["run", "reason"]
    )
    for name, run in list(runs.items()):
        for reason, number in _branch_reasons(run).items():
            branches.add_metric([name, reason], number)
    return branches


def _branch_reasons(run: ServedRun) -> Tally[str]:
    """Number of branches by reason, of ended sessions, which the run counts, and of open ones."""
    reasons = _by_reason(run, _BRANCH)
    for session in run.sessions.values():
        reasons.update(session.branch_reasons)
    return reasons


def _by_reason(run: ServedRun, prefix: str) -> Tally[str]:
    return Tally(
        {name.removeprefix(prefix): n for name, n in run.counters.items() if name.startswith(prefix)}
    )
