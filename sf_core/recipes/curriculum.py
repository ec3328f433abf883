"""Curricula: which task the next group gets, and how many sessions. What `rollout.curriculum` names. Pure.

Random numbers are drawn by (seed, group). The curriculum remembers the last outcomes of every task, ordered
by group. So the order in which outcomes arrive changes nothing, also after a restart.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, FiniteFloat

from sf_core.recipes.outcomes import Outcome, Pick, Success, TaskRef
from sf_core.settings import Settings

REMEMBERED = 8
"""Number of groups that are remembered per task."""

CANDIDATES = 64
"""Number of random tasks from which `order: draw` chooses."""

FIRST_LOOK = 64
"""Number of positions of an order that are examined together at first. Each further step examines four times
as many."""

Chance = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[FiniteFloat, Field(gt=0)]


class Stage(Settings):
    """Shares of the environment's parts until an iteration."""

    shares: dict[str, Weight] = Field(min_length=1)
    """Share of the groups for each part of the environment. The keys are the names of the parts. The shares
    need not sum to 1."""
    until: int | None = Field(None, ge=1)
    """Iteration at which this stage ends and the next stage begins. Only the last stage can leave this
    setting empty. Empty: the stage lasts until the run ends."""


class Sizes(Settings):
    """Fewer sessions for easy tasks (DART; Li et al. 2025)."""

    fewer: int = Field(ge=1)
    """Number of sessions per group for easy tasks. Groups of all other tasks have `group_size` sessions."""
    above: Chance = 0.6
    """Share of right sessions above which a task is easy. The share is computed over the sessions in the last
    8 groups of the task."""


class Curriculum(Settings):
    """For each task, the run remembers the last 8 groups and the number of right sessions in each group.
    `success` says when a session is right."""

    pool: int | None = Field(None, ge=1)
    """Number of tasks that are sampled repeatedly. With `stages`: number of such tasks per part of the
    environment. Must exceed the number of groups in flight: `groups_per_batch` times (1 + `max_lag`). Empty:
    each task is sampled once, in order."""
    order: Literal["epochs", "draw"] = "epochs"
    """Order of the tasks. epochs: in each epoch, every task of the pool is sampled once, in random order. The
    order changes with each epoch. draw: 64 tasks are drawn at random from the pool, and the task with the
    highest `utility` is sampled next."""
    solved: Chance = 1.0
    """Probability that a task is sampled when the order reaches the task, if the last group of the task was
    solved. After n solved groups in a row, the probability is this value to the power of n. With `order:
    draw`, this setting affects only the share `explore` of the groups. 0: a solved task is never sampled
    again (history resampling; SRPO, Zhang et al. 2025). 1: solved tasks are sampled as often as other
    tasks."""
    unsolved: Chance = 1.0
    """Probability that a task is sampled when the order reaches the task, if the last group of the task had
    no right session. After n such groups in a row, the probability is this value to the power of n (GRESO;
    Zheng et al. 2025). 1: unsolved tasks are sampled as often as other tasks."""
    solved_share: float = Field(1.0, gt=0, le=1)
    """Minimum share of right sessions for a group to count as solved. 1: all sessions must be right. Use a
    lower value if rewards are noisy."""
    floor: Chance = 0.0
    """Lower bound of the probabilities that `solved` and `unsolved` give. 0: no lower bound."""
    utility: Literal["progress", "variance", "hard"] = "progress"
    """Measure of a task's usefulness, for `order: draw`. The success rate p of the task is drawn from Beta(1
    + right, 1 + wrong), where right and wrong are the numbers of right and wrong sessions in the last 8
    groups of the task (Thompson sampling). progress: the absolute difference between p of the newer half of
    these groups and p of the older half, so that tasks with a changing success rate come first (Matiisen et
    al. 2017). A task with fewer than two groups uses `variance`. variance: p (1 - p), which is highest at p =
    1/2 (BOTS, MoPPS). hard: p (1 - p)^2, which is highest at p = 1/3."""
    explore: Chance = 0.1
    """Share of groups that take the next task in the order of `epochs` instead of the most useful task, for
    `order: draw`."""
    stages: tuple[Stage, ...] = ()
    """Stages of the run. Each stage says which share of the groups every part of the environment gets. Empty:
    the parts take turns."""
    sizes: Sizes | None = None
    """Rule that gives groups of easy tasks fewer sessions. Empty: every group has `group_size` sessions."""


class PastGroup(NamedTuple):
    """A group that the curriculum remembers."""

    group: int
    need: int
    """Number of sessions that complete the group."""
    scores: tuple[float, ...]
    """Scores of the sessions that count for the group. Empty: no session counts."""


class Tasks:
    """Picks tasks for the groups of one run, and remembers the outcomes of these groups.

    Scores are remembered, not verdicts. Under other rules they are judged anew: after a change of
    `success.at_least` at once. After a change of `success.part` they are those of the former part, until 8
    more groups of the task have ended.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.past: dict[TaskRef, list[PastGroup]] = {}
        """The last groups of each task, by their numbers."""
        self.positions: dict[str, int] = {}
        """Place of each source in its order from which the next pick continues."""
        self.in_flight: Counter[TaskRef] = Counter()
        """Tasks of groups that have not ended."""
        self.num_repeated = 0
        """Picks of a task that was in flight, or that had probability 0, because there was no other task."""
        self.rules: Curriculum | None = None
        self.success = Success()
        self.group_size = 1
        self.spare = 0
        self._pools: dict[str, _TaskPool] = {}

    def set_rules(
        self, rules: Curriculum | None, success: Success | None, group_size: int, spare: int
    ) -> None:
        """What is remembered stays."""
        if (rules, success or Success()) != (self.rules, self.success):
            self._pools.clear()
        self.rules = rules
        self.success = success or Success()
        self.group_size = group_size
        self.spare = spare

    def weigh(self) -> None:
        """Weigh the tasks of all pools now, which takes a second for 30,000 that are remembered. The first
        pick of a source would do it otherwise."""
        if self.rules is None or self.rules.pool is None:
            return
        for source in {source for stage in self.rules.stages for source in stage.shares} or {""}:
            if source not in self._pools:
                self._build_pool(self.rules, self.rules.pool, source)

    def pick(self, group: int, batch: int) -> Pick:
        """The task of a new group, which batch number `batch` is expected to take. The group is begun by
        `note`."""
        rules = self.rules
        if rules is None:
            return Pick(TaskRef("", group), 0, self.group_size, self.group_size + self.spare)
        random = np.random.default_rng((self.seed, 0, group))
        source = _draw_source(random, rules.stages, batch)
        index, position = self._index(random, rules, source)
        task = TaskRef(source, index)
        need = self._need(rules, task)
        return Pick(task, position, need, need + self.spare)

    def note(self, pick: Pick) -> None:
        """Note that a group with this pick has begun. Its task is in flight until `release`."""
        self._note_position(pick)
        self.in_flight[pick.task] += 1
        self._update(pick.task)

    def release(self, task: TaskRef) -> None:
        """Note that a group with this task has left."""
        if self.in_flight[task] > 1:
            self.in_flight[task] -= 1
        else:
            del self.in_flight[task]
        self._update(task)

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """Remember groups that have ended. A group that is observed twice changes nothing. Without a
        curriculum only the positions in the order are remembered."""
        for outcome in outcomes:
            if outcome.pick is None:
                continue
            self._note_position(outcome.pick)
            if self.rules is None:
                continue
            known = self.past.setdefault(outcome.pick.task, [])
            if all(past.group != outcome.group for past in known):
                scores = _reuse(tuple(result.score for result in outcome.results))
                insort(known, PastGroup(outcome.group, outcome.pick.need, scores))
                del known[:-REMEMBERED]
                self._update(outcome.pick.task)

    def _note_position(self, pick: Pick) -> None:
        source = pick.task.source
        if pick.position > self.positions.get(source, 0):
            self.positions[source] = pick.position

    def _update(self, task: TaskRef) -> None:
        if (task_pool := self._pools.get(task.source)) is not None:
            task_pool.update_task(task.number, self.past.get(task, ()), self.in_flight.get(task, 0))

    def _index(self, random: np.random.Generator, rules: Curriculum, source: str) -> tuple[int, int]:
        """The next task of this source, and the place from which the pick after it continues."""
        position = self.positions.get(source, 0)
        if rules.pool is None:
            while TaskRef(source, position) in self.in_flight:
                position += 1
            return position, position + 1
        task_pool = self._pools.get(source) or self._build_pool(rules, rules.pool, source)
        if rules.order == "draw" and random.random() >= rules.explore:
            index, is_free = task_pool.most_useful(random)
        else:
            index, position, is_free = task_pool.next_sampleable(random, self.seed, position)
        self.num_repeated += not is_free
        return index, position

    def _build_pool(self, rules: Curriculum, pool: int, source: str) -> _TaskPool:
        task_pool = self._pools[source] = _TaskPool(rules, pool, self.success, source)
        for task in self.past.keys() | self.in_flight.keys():
            if task.source == source:
                self._update(task)
        return task_pool

    def _need(self, rules: Curriculum, task: TaskRef) -> int:
        scores = [score for past in self.past.get(task, ()) for score in past.scores]
        if rules.sizes is None or not scores:
            return self.group_size
        is_easy = _num_right(scores, self.success) / len(scores) > rules.sizes.above
        return rules.sizes.fewer if is_easy else self.group_size


class _TaskPool:
    """The state of each task in the pool of one source, as arrays, so that many tasks are weighed at once."""

    def __init__(self, rules: Curriculum, pool: int, success: Success, source: str) -> None:
        self.rules = rules
        self.pool = pool
        self.success = success
        self.source = source
        self.busy: npt.NDArray[np.bool_] = np.zeros(pool, bool)
        """Whether a task is in flight [pool]."""
        self.chance: npt.NDArray[np.float64] = np.ones(pool)
        """Chance that a task is taken when its turn comes [pool]."""
        self.counts: npt.NDArray[np.int64] = np.zeros((pool, 2, 2), np.int64)
        """Sessions of the older and of the newer half of a task's memory, right and wrong [pool, 2, 2]."""
        self.num_free = self.num_sampleable = pool
        """Tasks that are not in flight, and those of them that have a chance."""

    def update_task(self, index: int, known: Sequence[PastGroup], num_in_flight: int) -> None:
        if index >= self.pool:
            # of a pool that was larger
            return
        self._adjust_totals(index, -1)
        self.busy[index] = num_in_flight > 0
        if self.rules.solved < 1 or self.rules.unsolved < 1:
            self.chance[index] = self._chance(known)
        self._adjust_totals(index, 1)
        if self.rules.order == "draw":
            half = len(known) // 2
            self.counts[index] = self._judge(known[:half]), self._judge(known[half:])

    def _adjust_totals(self, index: int, times: int) -> None:
        if not self.busy[index]:
            self.num_free += times
            self.num_sampleable += times * bool(self.chance[index] > 0)

    def _chance(self, known: Sequence[PastGroup]) -> float:
        rules = self.rules
        # a group that ended with few of its sessions says little about the task
        informative = [past.scores for past in known if 2 * len(past.scores) >= max(1, past.need)]
        shares = [_num_right(scores, self.success) / len(scores) for scores in informative]
        for matches, chance in (
            (lambda share: share >= rules.solved_share, rules.solved),
            (lambda share: share == 0, rules.unsolved),
        ):
            streak = next((n for n, share in enumerate(reversed(shares)) if not matches(share)), len(shares))
            if streak:
                return max(chance**streak, rules.floor)
        return 1.0

    def _judge(self, known: Sequence[PastGroup]) -> tuple[int, int]:
        """Right and wrong sessions. A group that ended without any counts as wrong: a task of which nothing
        is ever known would be drawn for ever."""
        right = sum(_num_right(past.scores, self.success) for past in known)
        return right, sum(len(past.scores) or past.need for past in known) - right

    def next_sampleable(self, random: np.random.Generator, seed: int, position: int) -> tuple[int, int, bool]:
        """The next free task that its probability lets through, the position after it, and True. If there is
        none within two epochs: the next free task, or else the next task, and False."""
        fallback = None
        for start, indices in self._ahead(seed, position):
            free = ~self.busy[indices]
            found = free & (random.random(len(indices)) < self.chance[indices])
            if found.any():
                at = int(found.argmax())
                return int(indices[at]), start + at + 1, True
            if fallback is None and (free.any() or self.num_free == 0):
                at = int(free.argmax())
                fallback = int(indices[at]), start + at + 1
            if fallback is not None and self.num_sampleable == 0:
                break
        assert fallback is not None, "two epochs have every task"
        return *fallback, False

    def _ahead(self, seed: int, position: int) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
        """Places from this one on, and the tasks there, two epochs of them."""
        end = position + 2 * self.pool
        width = FIRST_LOOK
        while position < end:
            epoch, offset = divmod(position, self.pool)
            indices = _order(seed, self.source, epoch, self.pool)[offset : offset + width]
            yield position, indices
            position = position + len(indices)
            width = 4 * width

    def most_useful(self, random: np.random.Generator) -> tuple[int, bool]:
        """The most useful of some tasks that are free, and True; if none is, any, and False."""
        some = _some(random, self.pool)
        free = some[~self.busy[some]]
        if 2 * len(free) < len(some):
            free = np.flatnonzero(~self.busy)
            free = free[_some(random, len(free))]
        indices = free if len(free) else some
        utilities = self._utilities(random, self.counts[indices])
        return int(indices[utilities.argmax()]), len(free) > 0

    def _utilities(
        self, random: np.random.Generator, counts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Utilities [N] of tasks with these counts [N, 2, 2]."""
        if self.rules.utility == "progress":
            newer = counts[:, 1]
            p = random.beta(1 + newer[:, 0], 1 + newer[:, 1])
            utility = p * (1 - p)
            # what has been sampled once has no older half
            has_older = counts[:, 0, 0] + counts[:, 0, 1] > 0
            older = counts[has_older, 0]
            p_before = random.beta(1 + older[:, 0], 1 + older[:, 1])
            utility[has_older] = np.abs(p[has_older] - p_before)
            return utility
        right, wrong = (1 + counts[:, 0] + counts[:, 1]).T
        p = random.beta(right, wrong)
        exponent = 2 if self.rules.utility == "hard" else 1
        return p * (1 - p) ** exponent


def _num_right(scores: Iterable[float], success: Success) -> int:
    return sum([success.is_right(score) for score in scores])


def _some(random: np.random.Generator, num: int) -> npt.NDArray[np.int64]:
    """All numbers below this one if they are few, else some, of which one may come twice."""
    if num <= CANDIDATES:
        return np.arange(num)
    return (random.random(CANDIDATES) * num).astype(np.int64)


def _draw_source(random: np.random.Generator, stages: Sequence[Stage], batch: int) -> str:
    """The source of a group of this batch; empty without stages."""
    stage = next((stage for stage in stages if stage.until is None or batch < stage.until), None)
    if stage is None:
        return ""
    names, bounds = _bounds(tuple(sorted(stage.shares.items())))
    drawn = bisect_right(bounds, random.random() * bounds[-1])
    return names[min(drawn, len(names) - 1)]


@lru_cache(maxsize=64)
def _bounds(shares: tuple[tuple[str, float], ...]) -> tuple[list[str], list[float]]:
    """Names, and the sums of their shares so far."""
    return [name for name, _ in shares], [*accumulate(share for _, share in shares)]


@lru_cache(maxsize=64)
def _order(seed: int, source: str, epoch: int, pool: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng((seed, 1, epoch, *source.encode())).permutation(
        np.arange(pool, dtype=np.int32)
    )


@lru_cache(maxsize=2**16)
def _reuse(scores: tuple[float, ...]) -> tuple[float, ...]:
    """One object for equal scores, of which there are few where rewards are 0 or 1."""
    return scores
