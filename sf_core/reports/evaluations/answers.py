"""Answers to held-out tasks, and those of two policy versions side by side."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import orjson
import pyarrow as pa

from sf_core.dataplane.chat.messages import Message, text_of
from sf_core.reports.view import RunView
from storage import files
from storage.json_files import load_json, parse_json
from storage.run_directory import RunDirectory
from storage.tables.trajectories import read_trajectories

SHOWN = 8
"""How many tasks are shown."""

GREEDY = "greedy"
"""Word for answers at temperature 0."""

_COLUMNS = ["task_id", "session_id", "branch_id", "messages", "reward", "status"]


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """The last answer of a session."""

    prompt: str
    """The first message of the user."""
    text: str
    reward: float | None
    """A failed session has the reward that the run gives it. None: it was not judged."""
    greedy: GivenAnswer | None = None
    """What the version answers at temperature 0, if that is known and another text."""

    @property
    def reward_text(self) -> str:
        """The reward in words."""
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
        prompt = _first_text(messages, "user")
        text = _first_text(reversed(messages), "assistant")
        found[rows[0]["task_id"]].append(GivenAnswer(prompt, text, rows[0]["reward"]))
    return found


def _first_text(messages: Iterable[Message], role: str) -> str:
    return next((text_of_answer(message) for message in messages if message["role"] == role), "")


def answers_of(view: RunView, version: int) -> dict[str, list[GivenAnswer]]:
    """Answers to the held-out tasks of a version's evaluation; nothing if it was not evaluated."""
    found = view.find_session_set(version, "evaluate")
    return read_answers(found.uris) if found is not None and found.uris else {}


Answers = Mapping[str, Sequence[GivenAnswer]]
Pair = tuple[GivenAnswer, GivenAnswer]


@dataclass(frozen=True, slots=True)
class Examples:
    """Answers of two versions to a few held-out tasks: tasks that became better and tasks that became worse,
    in the proportion of all tasks. Tasks that earned the same fill the rows that are left."""

    pairs: list[Pair]
    task_ids: Sequence[str] = ()
    """The task of each pair."""
    tasks: int = 0
    """Tasks that both versions have answered."""
    better: int = 0
    """Tasks that earned more with the later version."""
    worse: int = 0

    @property
    def has_greedy(self) -> bool:
        return any(new.greedy for _, new in self.pairs)

    @property
    def selection(self) -> str:
        """How the shown tasks were chosen, in one sentence."""
        more, less = share_rows(self.better, self.worse)
        same = len(self.pairs) - more - less
        return (
            f"of {self.tasks} held-out tasks, {self.better} became better and {self.worse} became worse; "
            f"{more} and {less} of them are shown"
            + (f", and {same} of the others" if same else "")
            + (f"; these answers are sampled, {GREEDY} ones are at temperature 0" if self.has_greedy else "")
        )


def compare_ends(view: RunView, versions: Collection[int]) -> tuple[int | None, int | None, Examples]:
    """The first and the last of these versions, and what `side_by_side` has of them; nothing of one alone."""
    if len(versions) < 2:
        return None, None, Examples([])
    before = min(versions)
    after = max(versions)
    return before, after, side_by_side(view, before, after)


def side_by_side(view: RunView, before: int, after: int) -> Examples:
    """Answers of two versions to the same few held-out tasks; nothing unless both were evaluated."""
    examples = choose_examples(answers_of(view, before), answers_of(view, after))
    greedy = read_greedy(view.run, after)
    pairs = [
        (old, _add_greedy(new, greedy.get(task)))
        for task, (old, new) in zip(examples.task_ids, examples.pairs, strict=True)
    ]
    return replace(examples, pairs=pairs)


def _add_greedy(answer: GivenAnswer, greedy: GivenAnswer | None) -> GivenAnswer:
    is_other = greedy is not None and greedy.text != answer.text
    return replace(answer, greedy=greedy) if is_other else answer


def write_greedy(run: RunDirectory, version: int, answers: Mapping[str, GivenAnswer]) -> None:
    """Store greedy answers of a version by task id."""
    given = {task: asdict(answer) for task, answer in answers.items()}
    files.write_atomic(run.greedy_file(version), orjson.dumps(given))


def read_greedy(run: RunDirectory, version: int) -> dict[str, GivenAnswer]:
    """Greedy answers of a version by task id, as far as they were asked for. Raises ValueError if their file
    is broken."""
    uri = run.greedy_file(version)
    text = files.read_if_there(uri)
    return {} if text is None else parse_json(dict[str, GivenAnswer], text, f"{uri}: cannot be read")


def choose_examples(old: Answers, new: Answers) -> Examples:
    """Examples among the tasks of both, the first ones of each kind."""
    gains = {task: _gain(old[task], new[task]) for task in old if task in new}
    better = [task for task, gain in gains.items() if gain > 0]
    worse = [task for task, gain in gains.items() if gain < 0]
    same = [task for task, gain in gains.items() if gain == 0]
    num_better, num_worse = share_rows(len(better), len(worse))
    num_same = SHOWN - num_better - num_worse
    shown = [*better[:num_better], *worse[:num_worse], *same[:num_same]]
    pairs = [_typical_pair(old[task], new[task], gains[task]) for task in shown]
    return Examples(pairs, shown, len(gains), len(better), len(worse))


def share_rows(better: int, worse: int, rows: int = SHOWN) -> tuple[int, int]:
    """How many of so many better and worse tasks are shown: in their proportion, and at least one of each.

    >>> share_rows(30, 4), share_rows(200, 1), share_rows(2, 3), share_rows(0, 9)
    ((7, 1), (7, 1), (2, 3), (0, 8))
    """
    if better + worse <= rows:
        return better, worse
    less = min(max(round(rows * worse / (better + worse)), min(worse, 1)), rows - min(better, 1))
    return rows - less, less


def _gain(old: Sequence[GivenAnswer], new: Sequence[GivenAnswer]) -> float:
    """What a task earned more on average; nothing if one version's answers were not judged."""
    before = [answer.reward for answer in old if answer.reward is not None]
    after = [answer.reward for answer in new if answer.reward is not None]
    return fmean(after) - fmean(before) if before and after else 0.0


def _typical_pair(old: Sequence[GivenAnswer], new: Sequence[GivenAnswer], gain: float) -> Pair:
    """The first answers of a task that differ in reward as the task does, else the first ones."""
    pairs = list(zip(old, new, strict=False))
    return next((pair for pair in pairs if gain * _gain(pair[:1], pair[1:]) > 0), pairs[0])


def text_of_answer(message: Message) -> str:
    """Text and calls of a message."""
    calls = [
        f"{call['function']['name']}({json.dumps(call['function']['arguments'], ensure_ascii=False)})"
        for call in message.get("tool_calls") or []
    ]
    return "\n".join(filter(None, [text_of(message), *calls]))
