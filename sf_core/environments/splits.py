"""Training and held-out tasks that never share a prompt. Knows nothing about what a task asks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from sf_core.types import Task

Split = Literal["train", "holdout"]
"""The split of a task: training or held-out."""

HOLDOUT_SIZE = 1024
STRIDE = 1 << 40
MAX_ATTEMPTS = 1000


def split_of(key: str, held_out: float = 0.2) -> Split:
    """Compute the split of a task from the hash of the task's key. `held_out` is the share of keys in the
    split `holdout`. The split of a key does not change when you add other keys.

    ```python
    split_of("photosynthesis")  # "train" or "holdout", always the same
    ```
    """
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
    return "holdout" if number < held_out * 2**64 else "train"


@dataclass(frozen=True, slots=True)
class Question:
    """A question that a generator makes from a number; equal numbers make equal questions."""

    prompt: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


class Splits:
    """An endless training split and `num_holdout` held-out tasks, drawn from one generator of questions."""

    def __init__(
        self, environment: str, make_question: Callable[[int], Question], num_holdout: int = HOLDOUT_SIZE
    ) -> None:
        self.environment = environment
        self._make_question = make_question
        self._num_holdout = num_holdout

    @cached_property
    def _holdout_prompts(self) -> frozenset[str]:
        return frozenset(self._make_question(number).prompt for number in range(self._num_holdout))

    def task(self, split: Split, index: int) -> Task:
        """Raises ValueError for an index outside the split."""
        question = self._holdout_question(index) if split == "holdout" else self._train_question(index)
        return Task(
            task_id=f"{self.environment}-{split}-{index}",
            environment=self.environment,
            prompt=question.prompt,
            answer=question.answer,
            metadata=question.metadata,
        )

    def _holdout_question(self, index: int) -> Question:
        if not 0 <= index < self._num_holdout:
            raise ValueError(
                f"held-out index {index}: {self.environment} has {self._num_holdout} held-out tasks"
            )
        return self._make_question(index)

    def _train_question(self, index: int) -> Question:
        if not 0 <= index < STRIDE - self._num_holdout:
            raise ValueError(f"training index {index}: expected 0 to {STRIDE - self._num_holdout - 1}")
        # a generator draws from a finite pool and repeats itself, so its prompt may be held out
        for attempt in range(MAX_ATTEMPTS):
            question = self._make_question(self._num_holdout + index + attempt * STRIDE)
            if question.prompt not in self._holdout_prompts:
                return question
        raise ValueError(f"{self.environment} has too few different prompts: nearly all of them are held out")


class HasTasks(Protocol):
    def task(self, split: Split, index: int) -> Task: ...


def in_equal_parts(sources: Mapping[str, HasTasks], split: Split, index: int) -> Task:
    """A task of all sources taken in turn."""
    source = list(sources.values())[index % len(sources)]
    return source.task(split, index // len(sources))
