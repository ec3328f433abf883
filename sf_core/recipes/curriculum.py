"""Curricula: which task the next group gets, and how many sessions. What `rollout.curriculum` names. Pure.

Chance is drawn by (seed, group). The memory is the last outcomes of every task, in the order of their groups:
told in whatever order, after a restart too, it is the same.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from sf_core.recipes.gates import num_right
from sf_core.recipes.outcomes import Outcome, Pick, Success, TaskRef
from sf_core.settings import Settings

REMEMBERED = 8
"""Outcomes of a task that count."""

CANDIDATES = 64
"""Tasks among which a draw chooses."""

Chance = Annotated[float, Field(ge=0, le=1)]


class Stage(Settings):
    """Shares of the sources, up to an iteration."""

    shares: dict[str, Annotated[float, Field(gt=0)]] = Field(min_length=1)
    """Sources of the environment, each with its share of the groups."""
    until: int | None = Field(None, ge=1)
    """First iteration of the next stage. Empty: to the end."""


class Sizes(Settings):
    """Sessions of a group by what is known of its task."""

    fewer: int = Field(ge=1)
    """Number where more than `above` of the sessions so far were right (DART)."""
    above: Chance = 0.6


class Curriculum(Settings):
    """Which tasks are sampled, by what came of them."""

    pool: int | None = Field(None, ge=1)
    """Number of tasks of each source. Empty: each task comes once, in order."""
    order: Literal["epochs", "draw"] = "epochs"
    """epochs: each task of the pool once, in an order of chance, then again. draw: the most useful of a
    few."""
    solved: Chance = 1.0
    """Chance, for each of its last groups in a row that were all right, that a task is taken when its turn
    comes. 0: none is taken again (history resampling, SRPO)."""
    unsolved: Chance = 1.0
    """Likewise for groups that were all wrong (GRESO)."""
    floor: Chance = 0.0
    """Least of these chances."""
    utility: Literal["progress", "variance", "hard"] = "progress"
    """What makes a task useful."""
    explore: Chance = 0.1
    """Share of draws that take the next of the order instead."""
    stages: tuple[Stage, ...] = ()
    sizes: Sizes | None = None


class Past(NamedTuple):
    group: int
    version: int
    won: int
    size: int

    @property
    def share(self) -> float:
        return self.won / self.size


class Tasks:
    """Picks tasks for the groups of one run, and remembers what came of them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.past: dict[TaskRef, list[Past]] = {}
        """The last outcomes of each task, by group number."""
        self.positions: dict[str, int] = {}
        """Place of each source in its order from which the next pick continues."""
        self.in_flight: Counter[TaskRef] = Counter()
        """Tasks of groups that have not ended."""
        self.num_repeated = 0
        """Picks of a task that was in flight or not worth it, because there was no other."""

    def set_rules(
        self, rules: Curriculum | None, success: Success | None, group_size: int, spare: int
    ) -> None:
        """What is remembered stays."""
        self.rules, self.success = rules, success or Success()
        self.group_size, self.spare = group_size, spare

    def pick(self, group: int, batch: int) -> Pick:
        """The task of a new group, which batch number `batch` is expected to take. It is in flight from now
        on, until `release`."""
        rules = self.rules
        if rules is None:
            pick = Pick(TaskRef("", group), 0, self.group_size, self.group_size + self.spare)
            self.note(pick)
            return pick
        busy = self.in_flight
        random = np.random.default_rng((self.seed, group))
        source = _drawn(random, self._shares(batch))
        if rules.order == "draw" and random.random() >= rules.explore:
            task, position = self._useful(random, source, busy), self.positions.get(source, 0)
        else:
            task, position = self._next(random, source, busy)
        need = self._need(task)
        pick = Pick(task, position, need, need + self.spare)
        self.note(pick)
        return pick

    def note(self, pick: Pick) -> None:
        """Note that a group with this pick has begun, in this process or in an earlier one."""
        self._note_position(pick)
        self.in_flight[pick.task] += 1

    def release(self, task: TaskRef) -> None:
        """Note that a group with this task has left."""
        if self.in_flight[task] > 1:
            self.in_flight[task] -= 1
        else:
            del self.in_flight[task]

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """Remember groups that have ended; told again, nothing changes."""
        for outcome in outcomes:
            if outcome.pick is None:
                continue
            self._note_position(outcome.pick)
            if self.rules is None:
                continue
            task = outcome.pick.task
            won = num_right(outcome.results, self.success)
            known = self.past.setdefault(task, [])
            past = Past(outcome.group, outcome.version, won, len(outcome.results))
            if past not in known:
                insort(known, past)
                del known[:-REMEMBERED]

    def _note_position(self, pick: Pick) -> None:
        source = pick.task.source
        self.positions[source] = max(self.positions.get(source, 0), pick.position)

    def _shares(self, iteration: int) -> Mapping[str, float]:
        assert self.rules is not None
        for stage in self.rules.stages:
            if stage.until is None or iteration < stage.until:
                return stage.shares
        return {"": 1.0}

    def _next(
        self, random: np.random.Generator, source: str, busy: Collection[TaskRef]
    ) -> tuple[TaskRef, int]:
        """The next task that is worth it, else the first that is free, else any."""
        rules = self.rules
        assert rules is not None
        position = self.positions.get(source, 0)
        if rules.pool is None:
            return TaskRef(source, position), position + 1
        free: tuple[TaskRef, int] | None = None
        for _ in range(2 * rules.pool):
            epoch, place = divmod(position, rules.pool)
            task = TaskRef(source, int(_order(self.seed, source, epoch, rules.pool)[place]))
            position += 1
            if task not in busy:
                free = free or (task, position)
                if random.random() < self._chance(task):
                    return task, position
        return free or (task, position)

    def _chance(self, task: TaskRef) -> float:
        rules, known = self.rules, self.past.get(task, [])
        assert rules is not None
        for share, chance in ((1.0, rules.solved), (0.0, rules.unsolved)):
            streak = 0
            while streak < len(known) and known[-1 - streak].share == share:
                streak += 1
            if streak:
                return max(chance**streak, rules.floor)
        return 1.0

    def _useful(self, random: np.random.Generator, source: str, busy: Collection[TaskRef]) -> TaskRef:
        rules = self.rules
        assert rules is not None and rules.pool is not None
        drawn = random.choice(rules.pool, min(CANDIDATES, rules.pool), replace=False)
        tasks = [TaskRef(source, int(index)) for index in drawn]
        tasks = [task for task in tasks if task not in busy] or tasks[:1]
        return tasks[int(np.argmax([self._utility(random, task) for task in tasks]))]

    def _utility(self, random: np.random.Generator, task: TaskRef) -> float:
        known = self.past.get(task, [])
        rules = self.rules
        assert rules is not None
        if rules.utility == "progress" and len(known) > 1:
            newer, older = known[len(known) // 2 :], known[: len(known) // 2]
            return abs(_share(random, newer) - _share(random, older))
        p = _share(random, known)
        return p * (1 - p) ** (2 if rules.utility == "hard" else 1)

    def _need(self, task: TaskRef) -> int:
        known, rules = self.past.get(task, []), self.rules
        assert rules is not None
        if rules.sizes is None or not known:
            return self.group_size
        won, size = sum(p.won for p in known), sum(p.size for p in known)
        return rules.sizes.fewer if won / size > rules.sizes.above else self.group_size


def _share(random: np.random.Generator, known: list[Past]) -> float:
    won, size = sum(p.won for p in known), sum(p.size for p in known)
    return float(random.beta(1 + won, 1 + size - won))


def _drawn(random: np.random.Generator, shares: Mapping[str, float]) -> str:
    names = sorted(shares)
    weights = np.array([shares[name] for name in names])
    return names[int(random.choice(len(names), p=weights / weights.sum()))]


@lru_cache(maxsize=16)
def _order(seed: int, source: str, epoch: int, pool: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, epoch, *source.encode())).permutation(pool)
