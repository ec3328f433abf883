"""Single-turn tasks of the public library reasoning-gym, made by its generators and scored by its scorers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from sf_core.environments.splits import Question, Split, Splits
from sf_core.types import Task


class ReasoningGym:
    """One dataset of the library, by its name there and its parameters."""

    def __init__(self, dataset: str, **parameters: Any) -> None:
        self._dataset_name = dataset
        self._parameters = parameters
        self._splits = Splits(dataset, self._make_question)

    @cached_property
    def _dataset(self) -> Any:
        import reasoning_gym  # costs more than a second; only a process that needs tasks pays it

        return reasoning_gym.create_dataset(self._dataset_name, seed=0, size=1 << 62, **self._parameters)

    def _make_question(self, number: int) -> Question:
        entry = self._dataset[number]
        return Question(entry["question"], entry["answer"], entry["metadata"])

    def task(self, split: Split, index: int) -> Task:
        return self._splits.task(split, index)

    def score(self, task: Task, answer: str) -> float:
        """Score between 0 and 1; some of the library's scorers give partial credit."""
        entry = {"question": task.prompt, "answer": task.answer, "metadata": task.metadata}
        return float(self._dataset.score_answer(answer.strip(), entry))
