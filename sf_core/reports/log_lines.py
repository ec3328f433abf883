"""Lines of progress in the log of a flow. `sf train` shows what this logger writes (sf_core/cli/live.py)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from sf_core.reports.view import RunView
from sf_core.reports.warnings import failures_line

log = logging.getLogger(__name__)
# independent of the level of other loggers: progress is what users look for in a log
log.setLevel(logging.INFO)


def log_progress(line: str, flow_run_id: str | None = None) -> None:
    """Write a line of progress to the log of the flow and to that of its run in Prefect. Prefect knows the
    run by its context; before that is made, name the run."""
    log.info("%s", line, extra=None if flow_run_id is None else {"flow_run_id": flow_run_id})


def log_warning(line: str) -> None:
    """Write a line about a failure that the run survives."""
    log.warning("%s", line)


_ITERATION = re.compile(r"iteration (\d+), \d+ of \d+: ")
"""Matches a line of `describe_iteration`."""


def find_unlogged(lines: Iterable[str], first: int) -> range:
    """The iterations before the first one of this attempt that have no line in the log, whose newest lines
    come first. Without any such line, as in the log of another flow run, only the last one is missing."""
    newest = next(filter(None, map(_ITERATION.match, lines)), None)
    return range(int(newest[1]) + 1 if newest else max(0, first - 1), first)


def describe_iteration(view: RunView, number: int, iterations: int) -> str:
    """Rewards, divergence from the teacher, tokens per second, duration and failures of a finished iteration,
    as one line."""
    iteration = view.iteration(number)
    figures = [f"reward {iteration.reward:.3f}"]
    if (evaluated := iteration.stages.get("evaluate")) is not None:
        figures.append(f"held-out {evaluated.data['reward_mean']:.3f} before the iteration")
    if (divergence := iteration.stages["train"].data.get("teacher_kl")) is not None:
        figures.append(f"KL to the teacher {divergence:.3g}")
    if (speed := iteration.tokens_per_second) is not None:
        figures += [f"{speed:,.0f} tokens/s", f"{iteration.seconds:.1f} s"]
    parts = [", ".join(figures), failures_line(iteration)]
    return f"iteration {number}, {number + 1} of {iterations}: {'; '.join(filter(None, parts))}"
