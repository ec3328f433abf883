"""Rewards of all answers of a group at once: functions for `environment.group_reward`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

from sf_core.types import Task


def majority(task: Task, answers: list[Any]) -> list[float] | None:
    """1 for the answer that most sessions of the group gave, 0 for others; no label is needed (TTRL, Zuo et
    al. 2025). None, which drops the group, if no answer was given more often than each other one. Empty
    answers have no vote and get 0. Texts are compared without case and surrounding space, numbers by their
    exact values.

    >>> majority(Task("t", "e", "2+2?"), ["4", " 4.0", "5", ""])
    [1.0, 1.0, 0.0, 0.0]
    >>> majority(Task("t", "e", "2+2?"), ["4", "5"])
    """
    comparable = [_comparable(answer) for answer in answers]
    ranked = Counter(answer for answer in comparable if answer is not None).most_common(2)
    if not ranked:
        return None
    winner, most_votes = ranked[0]
    is_tie = any(votes == most_votes for _, votes in ranked[1:])
    return None if is_tie else [float(answer == winner) for answer in comparable]


_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII)


def _comparable(answer: Any) -> Hashable:
    """Equal for answers that are the same, also within lists and objects; None for one that is absent."""
    if _is_absent(answer):
        return None
    if isinstance(answer, dict):
        return frozenset((name, _comparable(value)) for name, value in answer.items())
    if isinstance(answer, list):
        return tuple(map(_comparable, answer))
    text = answer if isinstance(answer, str) else json.dumps(answer)
    text = " ".join(text.split()).casefold()
    if _NUMBER.fullmatch(text):
        with suppress(InvalidOperation):  # an exponent of more digits than numbers have
            return Decimal(text)
    return text


def _is_absent(answer: Any) -> bool:
    if isinstance(answer, dict | list):
        return all(map(_is_absent, answer.values() if isinstance(answer, dict) else answer))
    return answer is None or (isinstance(answer, str) and not answer.strip())
