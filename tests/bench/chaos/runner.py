"""Injects faults into runs, one after the other, and reports the cost of each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean

from rich.table import Table

from storage.run_directory import STAGES
from tests.bench.chaos.faults import ClockJump, Fault
from tests.bench.chaos.training import Training
from tests.bench.stacks.invariants import Snapshot, check_result, manifests, weights

MAX_DELAY_S = 1.5
"""Longest delay of a fault after a commit, so that it hits the middle of the next stage."""


@dataclass
class Injection:
    fault: Fault
    before: Snapshot
    recovered_s: float
    """Seconds from the end of the fault until as many further stages as an iteration has are committed."""
    restarts: int
    """Number of restarts of the flow."""
    lost: list[str] = field(default_factory=list)
    """Committed stages and finished sessions that are missing or changed at the end of the run."""


def run_through(
    runs: Iterator[Training],
    faults: Sequence[Fault],
    rng: random.Random,
    tell: Callable[[str], None] = lambda line: None,
    undisturbed: Sequence[str] | None = None,
) -> list[Injection]:
    """Inject every fault once, in this order, in as many runs as needed, and check each run at its end.
    `undisturbed`: weights of a run of the same seed without faults, which these runs must reproduce."""
    left = list(faults)
    done = []
    while left:
        run = next(runs)
        try:
            injections = _one_run(run, left, rng, tell)
        finally:
            run.end()
        jumped = any(isinstance(injection.fault, ClockJump) for injection in injections)
        check_result(run.config, steady_clock=not jumped)
        if undisturbed is not None:
            made = weights(run.config)
            assert made == undisturbed[: len(made)], f"{run.config.run_id}: other weights than undisturbed"
        for injection in injections:
            injection.lost = injection.before.lost(run.config)
        done += injections
    return done


def run_undisturbed(run: Training) -> list[str]:
    """Run it to its end; returns its weights."""
    try:
        run.await_end()
    finally:
        run.end()
    made = weights(run.config)
    assert len(set(made)) == len(made), "an iteration has changed nothing: equal weights would say nothing"
    return made


def _one_run(
    run: Training, left: list[Fault], rng: random.Random, tell: Callable[[str], None]
) -> list[Injection]:
    """Inject faults into one run, removing them from `left`."""
    done: list[Injection] = []
    # of a run that has committed an iteration
    run.await_stages(5)
    while left:
        time.sleep(rng.uniform(0, MAX_DELAY_S))
        if run.has_ended:
            break
        before = run.snapshot()
        starts = run.starts
        fault = left.pop(0)
        fault.inject(run, rng)
        over = time.monotonic()
        run.await_stages(len(manifests(run.config)) + len(STAGES))
        injection = Injection(fault, before, time.monotonic() - over, run.starts - starts)
        tell(f"{fault.name}: {injection.recovered_s:.1f} s, flow started {injection.restarts} times")
        done.append(injection)
    run.await_end()
    return done


def table(injections: Sequence[Injection]) -> Table:
    shown = Table("fault", title="what was done to the runs")
    for heading in ("times injected", "recovered in s (mean)", "(most)", "flow restarted", "lost"):
        shown.add_column(heading, justify="right")
    for name in dict.fromkeys(injection.fault.name for injection in injections):
        of_it = [injection for injection in injections if injection.fault.name == name]
        seconds = [injection.recovered_s for injection in of_it]
        shown.add_row(
            name,
            str(len(of_it)),
            f"{mean(seconds):.1f}",
            f"{max(seconds):.1f}",
            str(sum(injection.restarts for injection in of_it)),
            str(sum(len(injection.lost) for injection in of_it)),
        )
    return shown
