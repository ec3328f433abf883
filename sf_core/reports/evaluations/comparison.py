"""How two policy versions compare on the same held-out tasks and seeds, and their answers side by side."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from sf_core.config import RunConfig
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


SOLVED = 1.0 - 1e-9
"""Reward from which a task counts as solved."""

RESAMPLES = 2000

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one version earned."""

    version: int
    reward: float
    """Mean over tasks of the mean over their answers."""
    interval: Interval
    """The 95 % interval of the reward, by a bootstrap over tasks (Efron 1979)."""
    solved: dict[int, float]
    """pass@k by k: the chance that one of k answers is solved (Chen et al. 2021, the unbiased estimate)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    environment: str
    changed: list[str]
    """Settings that differ from the run's."""
    tasks: int
    answers: int
    """Answers per task."""
    after: Measured
    before: Measured | None = None
    difference: float | None = None
    """Mean over tasks of what they earned after, less what they earned before."""
    interval: Interval | None = None
    """The 95 % interval of the difference, by a bootstrap over tasks."""
    won: int = 0
    """Tasks that earned more after than before."""
    lost: int = 0
    examples: list[tuple[GivenAnswer | None, GivenAnswer]] = field(default_factory=list)
    """Answers before and after to a few tasks."""


def compare(after: str, before: str | None, changed: Sequence[str]) -> Comparison:
    """Compare measurements of the same tasks, given by their run directories. Raises ValueError with one
    sentence if one of them is not done or a file is missing or broken."""
    return _compare(_read_measurement(after), None if before is None else _read_measurement(before), changed)


def compare_versions(view: RunView, before: int, after: int) -> Comparison | None:
    """Compare two versions of a run by the run's own evaluations; None unless both have answers to some task,
    in files that can be read."""
    config = view.run.read_config(RunConfig)
    try:
        old, new = (_Answered(version, config, answers_of(view, version)) for version in (before, after))
        return _compare(new, old, ()) if old.answers and new.answers else None
    except ValueError:
        return None


def _compare(new: _Answered, old: _Answered | None, changed: Sequence[str]) -> Comparison:
    alone = Comparison(
        environment=new.config.environment.name,
        changed=list(changed),
        tasks=new.config.evaluate.num_tasks,
        answers=new.config.evaluate.answers,
        after=new.measure(),
        examples=[(None, own[0]) for own in list(new.answers.values())[:SHOWN]],
    )
    if old is None:
        return alone
    if not new.answers.keys() & old.answers.keys():
        raise ValueError(f"versions {old.version} and {new.version} have no answered task in common")
    # of a task that one of them did not answer, that one has what a failed session is worth
    tasks = [*new.answers, *(task for task in old.answers if task not in new.answers)]
    unknown = [0.0] * (alone.tasks - len(tasks))
    judged = [task for task in tasks if new.rewards(task) and old.rewards(task)]
    gains = np.array([new.mean(task) - old.mean(task) for task in judged] + unknown)
    return replace(
        alone,
        before=old.measure(),
        difference=float(gains.mean()),
        interval=bootstrap(gains),
        won=int((gains > 0).sum()),
        lost=int((gains < 0).sum()),
        examples=[*choose_examples(old.answers, new.answers).pairs],
    )


@dataclass(frozen=True, slots=True)
class _Answered:
    """The answers of a version. Sessions that failed before they had any have none."""

    version: int
    config: RunConfig
    answers: Answers

    def rewards(self, task: str) -> list[float]:
        """Rewards of all sessions of a task, failed ones included, and none of those that were not judged."""
        known = [answer.reward for answer in self.answers.get(task, ())]
        num_failed = max(0, self.config.evaluate.answers - len(known))
        judged = [reward for reward in known if reward is not None]
        return judged + [self.config.rollout.failed_reward] * num_failed

    def mean(self, task: str) -> float:
        rewards = self.rewards(task)
        return sum(rewards) / len(rewards)

    def measure(self) -> Measured:
        evaluate = self.config.evaluate
        num_unanswered = max(0, evaluate.num_tasks - len(self.answers))
        rewards = [self.rewards(task) for task in self.answers]
        judged = [of_task for of_task in rewards if of_task]
        judged += [[self.config.rollout.failed_reward] * evaluate.answers] * num_unanswered
        means = np.array([sum(of_task) / len(of_task) for of_task in judged])
        solved: dict[int, float] = {}
        for k in sorted({1, evaluate.answers}):
            # of a task some answers may not have been judged
            chances = [
                pass_at(min(k, len(of_task)), len(of_task), _count_solved(of_task)) for of_task in judged
            ]
            solved[k] = float(np.mean(chances))
        return Measured(self.version, float(means.mean()), bootstrap(means), solved)


def _read_measurement(uri: str) -> _Answered:
    view = RunView.open(uri)
    if not (found := answers_of(view, 0)):
        raise ValueError(f"{view.run.uri}: the evaluation is not done, or no session gave an answer")
    return _Answered(version_of(uri), view.run.read_config(RunConfig), found)


def _count_solved(rewards: Sequence[float]) -> int:
    return sum(reward >= SOLVED for reward in rewards)


def bootstrap(values: np.ndarray) -> Interval:
    """Interval of 95 % of the mean of values [N], by resampling them; the same values give the same one.

    >>> bootstrap(np.ones(5))
    (1.0, 1.0)
    """
    random = np.random.default_rng(0)
    chosen = random.integers(0, len(values), (RESAMPLES, len(values)))
    means = values[chosen].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def pass_at(k: int, answers: int, solved: int) -> float:
    """Chance that of k among so many answers one is among the solved ones.

    >>> pass_at(1, 4, 1), pass_at(4, 4, 1)
    (0.25, 1.0)
    """
    return 1.0 - math.comb(answers - solved, k) / math.comb(answers, k)


def version_of(uri: str) -> int:
    """The version that a run directory of a measurement is named by."""
    return int(RunDirectory(uri).run_id.partition("-")[0].removeprefix("v"))


def write_comparison(folder: str, name: str, comparison: Comparison) -> str:
    """Store a comparison as JSON; returns its file."""
    uri = files.join(folder, f"{name}.json")
    files.write_atomic(
        uri, orjson.dumps(asdict(comparison), option=orjson.OPT_NON_STR_KEYS | orjson.OPT_INDENT_2)
    )
    return uri


def read_comparisons(folder: str) -> list[dict[str, object]]:
    """Stored comparisons as JSON values, by name."""
    return [orjson.loads(files.read_bytes(uri)) for uri in files.list_files(folder) if uri.endswith(".json")]
