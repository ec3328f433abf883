"""Training and held-out tasks that never share a prompt. Knows nothing about what a task asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from sf_core.types import Task

Split = Literal["train", "holdout"]

HOLDOUT_SIZE = 1024
STRIDE = 1 << 40
MAX_ATTEMPTS = 1000


@dataclass(frozen=True, slots=True)
class Question:
    """A question that a generator makes from a number; equal numbers make equal questions."""

    prompt: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


class Splits:
    """An endless training split and HOLDOUT_SIZE held-out tasks, drawn from one generator of questions."""

    def __init__(self, environment: str, make_question: Callable[[int], Question]) -> None:
        self.environment = environment
        self._make_question = make_question

    @cached_property
    def _holdout(self) -> list[Question]:
        return [self._make_question(number) for number in range(HOLDOUT_SIZE)]

    @cached_property
    def _holdout_prompts(self) -> frozenset[str]:
        return frozenset(question.prompt for question in self._holdout)

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
        if not 0 <= index < HOLDOUT_SIZE:
            raise ValueError(f"held-out index {index}: {self.environment} has {HOLDOUT_SIZE} held-out tasks")
        return self._holdout[index]

    def _train_question(self, index: int) -> Question:
        if not 0 <= index < STRIDE - HOLDOUT_SIZE:
            raise ValueError(f"training index {index}: expected 0 to {STRIDE - HOLDOUT_SIZE - 1}")
        # a generator draws from a finite pool and repeats itself, so its prompt may be held out
        for attempt in range(MAX_ATTEMPTS):
            question = self._make_question(HOLDOUT_SIZE + index + attempt * STRIDE)
            if question.prompt not in self._holdout_prompts:
                return question
        raise ValueError(f"{self.environment} has too few different prompts: nearly all are held out")
