"""Rewards of all answers of a group at once: functions for `environment.group_reward`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from sf_core.types import Task


def majority(task: Task, answers: list[Any]) -> list[float] | None:
    """1 for the answer that most sessions of the group gave, 0 for others; no label is needed (TTRL, Zuo et
    al. 2025). None, which drops the group, if no answer was given more often than each other one.
    Texts are compared without case and surrounding space.

    >>> majority(Task("t", "e", "2+2?"), ["4", " 4", "5"])
    [1.0, 1.0, 0.0]
    >>> majority(Task("t", "e", "2+2?"), ["4", "5"])
    """
    told = [_comparable(answer) for answer in answers]
    (first, most), *others = Counter(told).most_common(2)
    if others and others[0][1] == most:
        return None
    return [float(each == first) for each in told]


def _comparable(answer: Any) -> str:
    return (
        " ".join(answer.split()).casefold() if isinstance(answer, str) else json.dumps(answer, sort_keys=True)
    )
