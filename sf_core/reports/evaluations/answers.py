"""Answers to held-out tasks, and those of two policy versions side by side."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sf_core.dataplane.chat.messages import Message, text_of
from sf_core.reports.view import RunView
from storage.json_files import load_json
from storage.tables.trajectories import read_trajectories

SHOWN = 4
"""How many tasks are shown: the first ones, whatever they earned."""

_COLUMNS = ["task_id", "session_id", "branch_id", "messages", "reward", "status"]


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """The last answer of a session."""

    prompt: str
    """The first message of the user."""
    text: str
    reward: float | None
    """A failed session has the reward that the run gives it. None: it was not judged."""

    @property
    def told(self) -> str:
        """The reward as text."""
        return "not judged" if self.reward is None else f"{self.reward:.2f}"


def read_answers(uris: list[str]) -> dict[str, list[GivenAnswer]]:
    """Answers by task id, in the order of the sessions. Raises ValueError if a file is missing or broken."""
    table = pa.concat_tables([read_trajectories(uri, _COLUMNS) for uri in uris])
    sessions: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in table.to_pylist():
        sessions[row["session_id"]].append(row)
    found: dict[str, list[GivenAnswer]] = defaultdict(list)
    for rows in sessions.values():
        # the last branch has the newest turn
        messages = load_json(rows[-1]["messages"])
        prompt = next((_text(message) for message in messages if message["role"] == "user"), "")
        text = next((_text(message) for message in reversed(messages) if message["role"] == "assistant"), "")
        found[rows[0]["task_id"]].append(GivenAnswer(prompt, text, rows[0]["reward"]))
    return found


def answers_of(view: RunView, version: int) -> dict[str, list[GivenAnswer]]:
    """Answers to the held-out tasks of a version's evaluation; nothing if it was not evaluated."""
    found = view.find_session_set(version, "evaluate")
    return read_answers(found.uris) if found is not None and found.uris else {}


Pair = tuple[GivenAnswer, GivenAnswer]


def compare_ends(view: RunView, versions: Collection[int]) -> tuple[int | None, int | None, list[Pair]]:
    """The first and the last of these versions, and what `side_by_side` has of them; nothing of one alone."""
    if len(versions) < 2:
        return None, None, []
    before, after = min(versions), max(versions)
    return before, after, side_by_side(view, before, after)


def side_by_side(view: RunView, before: int, after: int) -> list[Pair]:
    """First answers of two versions to the same few held-out tasks; nothing unless both were evaluated."""
    old, new = answers_of(view, before), answers_of(view, after)
    both = [task for task in old if task in new]
    return [(old[task][0], new[task][0]) for task in both[:SHOWN]]


def _text(message: Message) -> str:
    calls = [
        f"{call['function']['name']}({json.dumps(call['function']['arguments'], ensure_ascii=False)})"
        for call in message.get("tool_calls") or []
    ]
    return "\n".join(filter(None, [text_of(message), *calls]))
