"""How two policy versions compare on the same held-out tasks and seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import orjson

from sf_core.config import RunConfig
from sf_core.reports.evaluations.answers import SHOWN, Answers, GivenAnswer, answers_of, choose_examples
from sf_core.reports.view import RunView
from storage import files
from storage.run_directory import RunDirectory

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
    """The 95 % interval of the reward, by a bootstrap over tasks (Efron 1979)."""
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
    """The 95 % interval of the difference, by a bootstrap over tasks."""
    won: int = 0
    """Tasks that earned more after than before."""
    lost: int = 0
    examples: list[tuple[GivenAnswer | None, GivenAnswer]] = field(default_factory=list)
    """Answers before and after to a few tasks."""


def compare(after: str, before: str | None, changed: Sequence[str]) -> Comparison:
    """Compare measurements of the same tasks, given by their run directories. Raises ValueError with one
    sentence if one of them is not done or a file is missing or broken."""
    return _compare(_read_measurement(after), None if before is None else _read_measurement(before), changed)


def compare_versions(view: RunView, before: int, after: int) -> Comparison | None:
    """Compare two versions of a run by the run's own evaluations; None unless both have answers to some task,
    in files that can be read."""
    config = view.run.read_config(RunConfig)
    try:
        old, new = (_Answered(version, config, answers_of(view, version)) for version in (before, after))
        return _compare(new, old, ()) if old.answers and new.answers else None
    except ValueError:
        return None


def _compare(new: _Answered, old: _Answered | None, changed: Sequence[str]) -> Comparison:
    alone = Comparison(
        environment=new.config.environment.name,
        changed=list(changed),
        tasks=new.config.evaluate.num_tasks,
        answers=new.config.evaluate.answers,
        after=new.measure(),
        examples=[(None, own[0]) for own in list(new.answers.values())[:SHOWN]],
    )
    if old is None:
        return alone
    if not new.answers.keys() & old.answers.keys():
        raise ValueError(f"versions {old.version} and {new.version} have no answered task in common")
    # of a task that one of them did not answer, that one has what a failed session is worth
    tasks = [*new.answers, *(task for task in old.answers if task not in new.answers)]
    unknown = [0.0] * (alone.tasks - len(tasks))
    judged = [task for task in tasks if new.rewards(task) and old.rewards(task)]
    gains = np.array([new.mean(task) - old.mean(task) for task in judged] + unknown)
    return replace(
        alone,
        before=old.measure(),
        difference=float(gains.mean()),
        interval=bootstrap(gains),
        won=int((gains > 0).sum()),
        lost=int((gains < 0).sum()),
        examples=[*choose_examples(old.answers, new.answers).pairs],
    )


@dataclass(frozen=True, slots=True)
class _Answered:
    """The answers of a version. Sessions that failed before they had any have none."""

    version: int
    config: RunConfig
    answers: Answers

    def rewards(self, task: str) -> list[float]:
        """Rewards of all sessions of a task, failed ones included, and none of those that were not judged."""
        known = [answer.reward for answer in self.answers.get(task, ())]
        num_failed = max(0, self.config.evaluate.answers - len(known))
        judged = [reward for reward in known if reward is not None]
        return judged + [self.config.rollout.failed_reward] * num_failed

    def mean(self, task: str) -> float:
        rewards = self.rewards(task)
        return sum(rewards) / len(rewards)

    def measure(self) -> Measured:
        evaluate = self.config.evaluate
        num_unanswered = max(0, evaluate.num_tasks - len(self.answers))
        rewards = [self.rewards(task) for task in self.answers]
        judged = [of_task for of_task in rewards if of_task]
        judged += [[self.config.rollout.failed_reward] * evaluate.answers] * num_unanswered
        means = np.array([sum(of_task) / len(of_task) for of_task in judged])
        solved: dict[int, float] = {}
        for k in sorted({1, evaluate.answers}):
            # of a task some answers may not have been judged
            chances = [
                pass_at(min(k, len(of_task)), len(of_task), _count_solved(of_task)) for of_task in judged
            ]
            solved[k] = float(np.mean(chances))
        return Measured(self.version, float(means.mean()), bootstrap(means), solved)


def _read_measurement(uri: str) -> _Answered:
    view = RunView.open(uri)
    if not (found := answers_of(view, 0)):
        raise ValueError(f"{view.run.uri}: the evaluation is not done, or no session gave an answer")
    return _Answered(version_of(uri), view.run.read_config(RunConfig), found)


def _count_solved(rewards: Sequence[float]) -> int:
    return sum(reward >= SOLVED for reward in rewards)


def bootstrap(values: np.ndarray) -> Interval:
    """Interval of 95 % of the mean of values [N], by resampling them; the same values give the same one.

    >>> bootstrap(np.ones(5))
    (1.0, 1.0)
    """
    random = np.random.default_rng(0)
    chosen = random.integers(0, len(values), (RESAMPLES, len(values)))
    means = values[chosen].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def pass_at(k: int, answers: int, solved: int) -> float:
    """Chance that of k among so many answers one is among the solved ones.

    >>> pass_at(1, 4, 1), pass_at(4, 4, 1)
    (0.25, 1.0)
    """
    return 1.0 - math.comb(answers - solved, k) / math.comb(answers, k)


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
