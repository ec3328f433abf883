"""How two policy versions compare on the same held-out tasks and seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import orjson

from sf_core.config import RunConfig
from sf_core.reports.evaluations.answers import SHOWN, Answer, answers_of
from sf_core.reports.view import RunView, open_run
from storage import files
from storage.run_directory import RunDirectory

MEASURED = "evaluations/_measured"
"""Folder in a run directory with a run directory for each version that was measured apart. Readers of Parquet
datasets skip names that begin so."""

SOLVED = 1.0 - 1e-9
"""Reward from which a task counts as solved."""

RESAMPLES = 2000

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one version earned."""

    version: int
    reward: float
    """Mean over tasks of the mean over their answers."""
    interval: Interval
    """Of 95 %, by a bootstrap over tasks (Efron 1979)."""
    solved: dict[int, float]
    """pass@k by k: the chance that one of k answers is solved (Chen et al. 2021, the unbiased estimate)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    environment: str
    changed: list[str]
    """Settings that differ from the run's."""
    tasks: int
    answers: int
    """Answers per task."""
    after: Measured
    before: Measured | None = None
    difference: float | None = None
    """Mean over tasks of what they earned after, less what they earned before."""
    interval: Interval | None = None
    """Of the difference, of 95 %, by a bootstrap over tasks."""
    won: int = 0
    """Tasks that earned more after than before."""
    lost: int = 0
    examples: list[tuple[Answer | None, Answer]] = field(default_factory=list)
    """First answers before and after to the first tasks."""


Answers = Mapping[str, Sequence[Answer]]


def compare(after: str, before: str | None, changed: Sequence[str]) -> Comparison:
    """Compare measurements of the same tasks, given by their run directories. Raises ValueError with one
    sentence if one of them is not done or a file is missing or broken."""
    new_view = open_run(after)
    config, new = new_view.run.read_config(RunConfig), _answers(new_view)
    alone = Comparison(
        environment=config.environment.name,
        changed=list(changed),
        tasks=len(new),
        answers=config.evaluate.answers,
        after=_measured(after, new),
        examples=[(None, own[0]) for own in list(new.values())[:SHOWN]],
    )
    if before is None:
        return alone
    old = _answers(open_run(before))
    tasks = [task for task in new if task in old]
    if not tasks:
        raise ValueError(f"{before} and {after} have no task in common")
    gains = np.array([_mean(new[task]) - _mean(old[task]) for task in tasks])
    return replace(
        alone,
        tasks=len(tasks),
        before=_measured(before, old),
        difference=float(gains.mean()),
        interval=bootstrap(gains),
        won=int((gains > 0).sum()),
        lost=int((gains < 0).sum()),
        examples=[(old[task][0], new[task][0]) for task in tasks[:SHOWN]],
    )


def bootstrap(values: np.ndarray) -> Interval:
    """Interval of 95 % of the mean of values [N], by resampling them; the same values give the same one.

    >>> bootstrap(np.ones(5))
    (1.0, 1.0)
    """
    chosen = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[chosen].mean(1), (0.025, 0.975))
    return float(low), float(high)


def pass_at(k: int, answers: int, solved: int) -> float:
    """Chance that of k among so many answers one is among the solved ones.

    >>> pass_at(1, 4, 1), pass_at(4, 4, 1)
    (0.25, 1.0)
    """
    return 1.0 - math.comb(answers - solved, k) / math.comb(answers, k)


def _answers(view: RunView) -> Answers:
    if not (found := answers_of(view, 0)):
        raise ValueError(f"{view.run.uri}: its evaluation is not done")
    return found


def _mean(answers: Sequence[Answer]) -> float:
    return sum(answer.reward for answer in answers) / len(answers)


def _measured(uri: str, answers: Answers) -> Measured:
    means = np.array([_mean(own) for own in answers.values()])
    most = min(len(own) for own in answers.values())
    solved = {
        k: float(
            np.mean([pass_at(k, len(own), sum(a.reward >= SOLVED for a in own)) for own in answers.values()])
        )
        for k in sorted({1, most})
    }
    return Measured(version_of(uri), float(means.mean()), bootstrap(means), solved)


def version_of(uri: str) -> int:
    """The version that a run directory of a measurement is named by."""
    return int(RunDirectory(uri).run_id.partition("-")[0].removeprefix("v"))


def write_comparison(folder: str, name: str, comparison: Comparison) -> str:
    """Store a comparison as JSON; returns its file."""
    uri = files.join(folder, f"{name}.json")
    files.write_atomic(
        uri, orjson.dumps(asdict(comparison), option=orjson.OPT_NON_STR_KEYS | orjson.OPT_INDENT_2)
    )
    return uri


def read_comparisons(folder: str) -> list[dict[str, object]]:
    """Stored comparisons as JSON values, by name."""
    return [orjson.loads(files.read_bytes(uri)) for uri in files.list_files(folder) if uri.endswith(".json")]
