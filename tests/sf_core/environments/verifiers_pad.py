"""Environments for verifiers, as its packages have them: a module with load_environment."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def count_letters(word: str) -> str:
    """Count the letters of a word."""
    return str(len(word))


def right(completion: list[dict[str, Any]], answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def short(completion: list[dict[str, Any]]) -> float:
    return float(len(completion[-1]["content"]) < 4)


def load_environment(kind: str = "single", rows: int = 40, evaluated: bool = True) -> vf.Environment:
    train = rows_of("train", rows)
    other = rows_of("eval", 8)
    given = {
        # one row is in both
        "dataset": Dataset.from_list(train + other[:1]),
        "eval_dataset": Dataset.from_list(other) if evaluated else None,
        "rubric": vf.Rubric(funcs=[right, short], weights=[1.0, 0.5]),
        "system_prompt": "Be brief.",
    }
    if kind == "tool":
        return vf.ToolEnv(tools=[count_letters], max_turns=3, **given)
    return vf.SingleTurnEnv(**given)


def rows_of(split: str, number: int) -> list[dict[str, str]]:
    return [
        {"question": f"How long is {split}{'x' * i}?", "answer": str(len(split) + i)} for i in range(number)
    ]
