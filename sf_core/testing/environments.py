"""The contract of environments, as tests: a test class inherits from EnvironmentTests and names an
environment, or functions.

Needs no pytest. Functions of a module are named as `tasks = staticmethod(my_package.tasks)`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from sf_core.environments.environment import Environment
from sf_core.types import Scored, Task


class EnvironmentTests:
    """Tests that every environment should pass. In a test file, inherit from this class and set either
    `environment`, or both `tasks` and `reward`.

    ```python
    import speller
    from seamlessflow.testing import EnvironmentTests

    class TestSpeller(EnvironmentTests):
        tasks = staticmethod(speller.tasks)
        reward = staticmethod(speller.reward)
    ```
    """

    environment: Environment | None = None
    """The environment; None if `tasks` and `reward` are set."""
    tasks: Callable[[str, int], Task]
    """The function that `environment.tasks` names in YAML."""
    reward: Callable[[Task, Any], Any]
    """The function that `environment.reward` names in YAML."""
    num_tasks = 200
    """Number of tasks that the tests make, per split."""
    num_scored = 20
    """Number of tasks for which the tests score answers, per split. Use a smaller number if scoring is
    slow."""

    def test_equal_arguments_give_equal_tasks(self) -> None:
        """Making the same tasks twice gives equal tasks."""
        for split in ("train", "holdout"):
            assert self._draw(split) == self._draw(split)

    def test_an_id_names_one_task(self) -> None:
        """Tasks with the same id are equal."""
        drawn = self._draw("train") + self._draw("holdout")
        prompts: dict[str, Any] = {}
        for task in drawn:
            content = task.environment, task.prompt, task.answer
            assert prompts.setdefault(task.task_id, content) == content, f"{task.task_id} names two tasks"

    def test_no_held_out_task_is_trained_on(self) -> None:
        """No held-out prompt is among the training prompts."""
        held_out = {(task.environment, task.prompt) for task in self._draw("holdout")}
        both = [task for task in self._draw("train") if (task.environment, task.prompt) in held_out]
        assert not both, f"{both[0].task_id} is held out and trained on"

    def test_any_answer_gets_a_finite_reward(self) -> None:
        """Empty, wrong, long and unusual answers get a finite reward."""
        train = self._draw("train")[: self.num_scored]
        holdout = self._draw("holdout")[: self.num_scored]
        for task in train + holdout:
            for answer in ("", task.answer, task.answer + "x", "\x00 \n<|im_end|> 数", "9" * 10_000):
                reward = self._reward(task, answer)
                parts = reward if isinstance(reward, Mapping) else {"reward": reward}
                assert parts
                for name, value in parts.items():
                    assert isinstance(name, str)
                    assert math.isfinite(float(value)), (task.task_id, reward)

    def test_an_answer_is_worth_the_same_each_time(self) -> None:
        """Scoring the same answer twice gives the same reward."""
        for task in self._draw("train")[: self.num_scored]:
            assert self._reward(task, task.answer) == self._reward(task, task.answer)

    def _draw(self, split: str) -> list[Task]:
        tasks: Any = (self.environment or self).tasks
        return [tasks(split, index) for index in range(self.num_tasks)]

    def _reward(self, task: Task, answer: str) -> float | Mapping[str, float]:
        reward: Any = (self.environment or self).reward(task, answer)
        if inspect.iscoroutine(reward):
            reward = asyncio.run(reward)
        return reward.reward if isinstance(reward, Scored) else reward
