"""What becomes of a claimed session: it is prepared, its agent runs, its answer is scored.

Each phase has a pool, a longest time, and a cause under which its failure counts. What is ready belongs to
its session: it waits for its place through pauses, updates of the weights and restarts of the data plane.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from sf_core.agents.command import CommandEnd, CommandError
from sf_core.agents.event_loop import Threads
from sf_core.agents.judges.judges import Judges, takes_judges
from sf_core.config import RolloutConfig
from sf_core.config.rollout_config import CODE_ERRORS, Cause
from sf_core.process.user_code import name_function
from sf_core.settings import quote
from sf_core.types import Endpoint, NotJudged, Scored, Task
from storage.tables.judgements import Judgement

Phase = Literal["tasks", "prepare", "agent", "reward"]

Prepare = Callable[[Task], AbstractAsyncContextManager[Any]]


_COROUTINE = "a coroutine: define the function with `async def`, and `await` the coroutine in this function"

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 15.0
"""Seconds between two times that an answer is scored because it was not judged: twice as many each time."""


MISSING_RETURN = "if the reward function needs an answer, the agent lacks a `return`"
"""What follows from an answer that is None."""

log = logging.getLogger(__name__)


class LateError(Exception):
    """A phase took longer than it may."""


@dataclass
class Work:
    """A session that a runner works on."""

    session_id: str
    facts: dict[str, str] = field(default_factory=dict)
    """Further fields of its report: id and environment of the task, what a command as agent wrote."""
    phase: Phase = "tasks"
    """What would have failed, if it failed now."""
    cause: Cause | None = None
    """Cause of its failure where a command as agent tells it."""
    judgements: list[Judgement] = field(default_factory=list)
    """What was asked and noted while its answer was scored. The first of a group has those of all."""

    def cause_of(self, error: BaseException) -> Cause:
        if self.cause is not None:
            return self.cause
        if self.phase == "prepare" or self.phase == "reward":
            return self.phase
        return "code" if isinstance(error, CODE_ERRORS) else "agent"


class Phases:
    """The pools of one runner."""

    def __init__(
        self,
        rules: RolloutConfig,
        agent: Callable[..., Any],
        reward: Callable[..., Any],
        prepare: Prepare | None,
        group_reward: Callable[..., Any] | None = None,
        judges: Judges | None = None,
    ) -> None:
        """`judges` must be entered while answers are scored."""
        self._rules = rules
        self._agent = agent
        self._reward = reward
        self._prepare = prepare
        self._group_reward = group_reward
        self._judges = judges or Judges({}, {})
        # reads the file of the function
        self._reward_name = name_function(reward)
        self._max_scored = rules.score_concurrency or rules.concurrency
        self._running = asyncio.Semaphore(rules.concurrency)
        self._scoring = asyncio.Semaphore(self._max_scored)
        self._threads = Threads()
        self._has_told_none = False
        self.begun: dict[str, dict[str, str]] = {}
        """Tasks by session id, of sessions whose agents have begun since the data plane was told."""
        self.answered: list[str] = []
        """Ids of sessions whose agents have ended since then."""
        self.ended: set[str] = set()
        """Ids of the runner's sessions whose agents have ended."""

    def note_told(self, begun: Iterable[str], answered: Sequence[str]) -> None:
        """Forget what the data plane was told."""
        for session_id in begun:
            del self.begun[session_id]
        del self.answered[: len(answered)]

    def room(self, num_sessions: int) -> int:
        """Number of sessions to claim beside these."""
        # who scores slowly gathers no answers without end
        num_scored = min(len(self.ended), self._max_scored)
        num_claimed = num_sessions - num_scored + self._threads.num_excess
        return max(0, self._rules.concurrency + self._rules.prepare_ahead - num_claimed)

    def room_for_answers(self, num_sessions: int) -> int:
        """Number of answers to claim for scoring beside these."""
        return max(0, self._max_scored - num_sessions - self._threads.num_excess)

    async def run(self, work: Work, task: Task, endpoint: Endpoint) -> Any:
        """Have the agent work on its task, once that is prepared and there is a place; returns its answer."""
        async with AsyncExitStack() as stack:
            prepared: tuple[Any, ...] = ()
            if self._rules.prepare_ahead:
                prepared = await stack.enter_async_context(self._hold_prepared(work, task))
            async with self._running:
                self.begun[work.session_id] = dict(work.facts)
                if not self._rules.prepare_ahead:
                    prepared = await stack.enter_async_context(self._hold_prepared(work, task))
                work.phase = "agent"
                answer = await self._answer(work, task, endpoint, *prepared)
                self.ended.add(work.session_id)
                self.answered.append(work.session_id)
                work.phase = "prepare"
        return answer

    async def score(self, work: Work, task: Task, answer: Any) -> dict[str, Any]:
        """The fields of a report on what an answer earned. Raises NotJudged if that could not be had."""
        self.ended.add(work.session_id)
        async with self._scoring:
            work.phase = "reward"
            with self._naming_the_agent([answer], f"the reward function {self._reward_name}"):
                returned = await self._until_judged(work, self._reward, task, answer)
                return _take_noted(work, as_reward(returned, self._reward_name))

    async def judge(
        self, works: Sequence[Work], task: Task, answers: list[Any]
    ) -> list[dict[str, Any]] | None:
        """The fields of the reports on what the answers of a group earned; None: the group is dropped. Raises
        NotJudged if it could not be had."""
        assert self._group_reward is not None
        self.ended.update(work.session_id for work in works)
        async with self._scoring:
            for work in works:
                work.phase = "reward"
            name = name_function(self._group_reward)
            with self._naming_the_agent(answers, f"the function group_reward {name}"):
                returned = await self._until_judged(works[0], self._group_reward, task, answers)
                rewards = as_rewards(returned, len(answers), name)
        return rewards and [_take_noted(*pair) for pair in zip(works, rewards, strict=True)]

    @asynccontextmanager
    async def _hold_prepared(self, work: Work, task: Task) -> AsyncIterator[tuple[Any, ...]]:
        """What the agent gets beside task and endpoint, as long as it is needed."""
        if self._prepare is None:
            yield ()
            return
        async with AsyncExitStack() as stack:
            work.phase = "prepare"
            async with limit_time("preparing took", "prepare_timeout_s", self._rules.prepare_timeout_s):
                prepared = await stack.enter_async_context(self._prepare(task))
            yield (prepared,)

    async def _answer(self, work: Work, task: Task, endpoint: Endpoint, *prepared: Any) -> Any:
        try:
            answer = await self._threads.call(self._agent, task, endpoint, *prepared)
        except CommandError as error:
            work.cause = error.cause
            work.facts["output"] = error.output
            raise
        if inspect.iscoroutine(answer):
            answer.close()
            raise TypeError(f"the agent {name_function(self._agent)} returned {_COROUTINE}")
        if isinstance(answer, CommandEnd):
            work.facts["output"] = answer.output
            answer = answer.answer
        if answer is None and not self._has_told_none:
            # legal: a reward function need not look at it
            self._has_told_none = True
            log.warning("%s: %s", describe_none(self._agent), MISSING_RETURN)
        return answer

    @contextmanager
    def _naming_the_agent(self, answers: Sequence[Any], scorer: str) -> Iterator[None]:
        """Have an error of what scores these answers say that the agent returned None, if it did."""
        try:
            yield
        except Exception as error:
            is_there = all(answer is not None for answer in answers)
            if is_there or isinstance(error, LateError | NotJudged):
                raise
            fault = str(error)
            # what was returned is told by its function already
            if not fault.startswith(scorer):
                fault = f"{scorer} raised {type(error).__name__}: {error}"
            raise ValueError(f"{describe_none(self._agent)}, for which {fault}") from error

    async def _until_judged(self, work: Work, function: Callable[..., Any], *args: Any) -> Any:
        """What a reward function returns, which is called again when it raises NotJudged. Raises that if its
        time is over then, or it waits for a judge when its time is over."""
        unjudged: NotJudged | None = None
        pause = FIRST_PAUSE_S
        with self._judges.record() as (judges, record):
            # without judges a function has what its parameter has by itself
            asks = judges and takes_judges(function)
            call = partial(function, judges=judges) if asks else function
            try:
                async with limit_time("scoring took", "score_timeout_s", self._rules.score_timeout_s):
                    while True:
                        try:
                            return await self._threads.call(call, *args)
                        except NotJudged as error:
                            unjudged = error
                            record.drop_cached()
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, LONGEST_PAUSE_S)
            except LateError as error:
                if record.num_awaited and unjudged is None:
                    unjudged = NotJudged(f"{error} while it waited for a judge")
                if unjudged is None:
                    raise
                raise unjudged from None
            finally:
                work.judgements += record.judgements


def describe_none(agent: Callable[..., Any]) -> str:
    """That an agent returned None, in words."""
    return f"the agent {name_function(agent)} returned None"


def _take_noted(work: Work, scored: dict[str, Any]) -> dict[str, Any]:
    """The fields of a report, without numbers that are only noted."""
    for name, number in scored.pop("noted", {}).items():
        work.judgements.append(Judgement(item=name, verdict=repr(number)))
    return scored


@asynccontextmanager
async def limit_time(what_took: str, setting: str, seconds: float) -> AsyncIterator[None]:
    """Raises LateError once the block has run for so long: `what` longer than the setting of `rollout`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise LateError(f"{what_took} longer than rollout.{setting} ({seconds:g} s)") from None
        raise


def as_rewards(values: Any, number: int, function: str) -> list[dict[str, Any]] | None:
    """The fields of the reports on what a function returned for the answers of a group; None for None. Raises
    ValueError with one sentence if that is not a reward for each."""
    if values is None:
        return None
    if inspect.iscoroutine(values):
        values.close()
        raise ValueError(f"the function group_reward {function} returned {_COROUTINE}")
    try:
        rewards = list(values)
    except TypeError:
        rewards = []
    if len(rewards) != number or isinstance(values, str | bytes | Mapping):
        raise ValueError(
            f"the function group_reward {function} returned {quote(values)}, expected a list with a reward "
            f"for each of {number} answers"
        )
    return [as_reward(value, function) for value in rewards]


def as_reward(value: Any, function: str) -> dict[str, Any]:
    """The fields of a report on what a reward function returned. Raises ValueError with one sentence if that
    is no finite number."""

    def number(value: Any, of: str = "") -> float:
        try:
            result = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            result = math.nan
        if not math.isfinite(result):
            raise ValueError(
                f"the reward function {function} returned {quote(value)}{of}, which is not a finite number"
            )
        return result

    if inspect.iscoroutine(value):
        value.close()
        raise ValueError(f"the reward function {function} returned {_COROUTINE}")
    steps: dict[str, float] = {}
    noted: dict[str, Any] = {}
    if isinstance(value, Scored):
        steps = {str(answer): number(step, f" for {answer!r}") for answer, step in value.steps.items()}
        if value.noted:
            noted = {
                "noted": {str(name): number(note, f" as {name!r}") for name, note in value.noted.items()}
            }
        value = value.reward
    parts = {}
    if isinstance(value, Mapping) and value:
        parts = {str(name): number(part, f" as {name!r}") for name, part in value.items()}
    total = number(sum(parts.values()) if parts else value)
    return {"reward": total, "reward_parts": parts, "step_rewards": steps, **noted}
