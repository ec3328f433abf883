"""Tasks of known use, for benchmarks/curricula.py: those that teach, among those that do not.

easy: two letters backward. live: four to six letters backward, and sums. hard: eight to ten letters.
impossible: the answer is not in the prompt. random: a live task whose reward is a coin per session. The kind
of a training task is a hash of its index, and each twenty indices in a row have the exact shares. All are in
one part, so that a curriculum may move between the kinds; it is not told which is which.
"""

from __future__ import annotations

import random
from functools import cache
from random import Random
from string import ascii_lowercase
from typing import Annotated, Any, Literal

from pydantic import Field

from benchmarks.single_turn import ask
from sf_core.environments.environment import Demonstration, Environment
from sf_core.environments.splits import Question, Split, split_of
from sf_core.types import Endpoint, Task

Kind = Literal["easy", "impossible", "random", "hard", "live"]
Share = Annotated[float, Field(ge=0, le=1)]

BLOCK = 20
"""Tasks in a row whose kinds have the shares of the settings."""

EASY_HELD_OUT = 5
"""One held-out task in so many is easy, the others are live."""

LETTERS: dict[Kind, tuple[int, int]] = {"easy": (2, 2), "live": (4, 6), "hard": (8, 10)}

AGO = 64
"""A group may be told what came of the one that was begun so many groups before: at 16 groups a batch and a
lag bound of 1 that one has ended."""

told: dict[tuple[str, int, int], float] = {}
"""What came of each session of this process, by run, group and member."""


class RecipeTasks(Environment):
    """Tasks of five kinds in shares of choice, answered in one turn. Held-out ones are live, one in five
    easy."""

    easy: Share = 0.0
    """Share of easy tasks. What the shares leave is live."""
    impossible: Share = 0.0
    """Share of impossible tasks."""
    random: Share = 0.0
    """Share of tasks with random rewards."""
    hard: Share = 0.0
    """Share of hard tasks."""
    flips: Share = 0.0
    """Chance that the reward of a training session is turned round."""
    tells_others: bool = False
    """Adds the part `told` to rewards: what came of a session of another group. The part `rest` takes it
    away again, so that the reward stays what it is. A negative control for `rollout.success.part`."""

    def kind(self, index: int) -> Kind:
        """Kind of a training task."""
        block, place = divmod(index, BLOCK)
        drawn = (_shuffled(block)[place] + 0.5) / BLOCK
        until = 0.0
        shares: list[tuple[Kind, float]] = [
            ("easy", self.easy),
            ("impossible", self.impossible),
            ("random", self.random),
            ("hard", self.hard),
        ]
        for kind, share in shares:
            until += share
            if drawn < until:
                return kind
        return "live"

    def tasks(self, split: Split, index: int) -> Task:
        if split == "train":
            return _task(self.kind(index), split, index)
        return _task("live" if index % EASY_HELD_OUT else "easy", split, index)

    async def agent(self, task: Task, endpoint: Endpoint) -> Any:
        text = await ask(endpoint, task.prompt)
        return {"text": text, "place": _place(endpoint)} if self.tells_others else text

    def reward(self, task: Task, answer: Any) -> dict[str, float]:
        if not self.tells_others:
            return {"answer": self._score(task, answer)}
        score = self._score(task, answer["text"])
        (run, group, member) = answer["place"]
        told[run, group, member] = score
        other = told.get((run, group - AGO, member), float(random.random() < 0.5))
        return {"answer": score, "told": other, "rest": -other}

    def _score(self, task: Task, text: str) -> float:
        if task.environment == "random":
            return float(random.random() < 0.5)
        is_flipped = task.metadata["split"] == "train" and random.random() < self.flips
        return float((text.strip() == task.answer) != is_flipped)

    def demonstrate(self, index: int) -> Demonstration:
        """Easy tasks done right, and live ones with a mistake in two of three answers. The same for all
        shares, so that policies of one seed are equal."""
        kind: Kind = "easy" if index % 2 == 0 else "live"
        task = _task(kind, "train", index)
        answer = task.answer if kind == "easy" else _with_mistakes(task.answer, Random(f"shown {index}"))
        said = [("user", task.prompt), ("assistant", answer)]
        return Demonstration([{"role": role, "content": text} for role, text in said])


@cache
def _shuffled(block: int) -> list[int]:
    return Random(f"kinds {block}").sample(range(BLOCK), BLOCK)


def _task(kind: Kind, split: Split, index: int) -> Task:
    question = _question(kind, split, index)
    return Task(f"{kind}-{split}-{index}", kind, question.prompt, question.answer, {"split": split})


def _question(kind: Kind, split: Split, index: int) -> Question:
    """The first question of the kind, of those drawn for this index, whose prompt is of the split."""
    draws = Random(f"{kind} {split} {index}")
    while True:
        question = _draw("live" if kind == "random" else kind, draws)
        if split_of(question.prompt) == split:
            return question


def _draw(kind: Kind, draws: Random) -> Question:
    if kind == "impossible":
        return Question(f"What is {_word(draws, 5)}?", _word(draws, 8))
    if kind == "live" and draws.random() < 0.2:
        left = draws.randint(1, 9)
        right = draws.randint(1, 9)
        return Question(f"What is {left}+{right}?", str(left + right))
    word = _word(draws, draws.randint(*LETTERS[kind]))
    return Question(f"Spell this word backward (example: sun -> nus): {word}", word[::-1])


def _word(draws: Random, length: int) -> str:
    return "".join(draws.choices(ascii_lowercase, k=length))


MISTAKEN = 0.2
"""Share of the characters of live answers that a demonstration has wrong."""


def _with_mistakes(answer: str, draws: Random) -> str:
    """Each character replaced by one of its sort with a chance of `MISTAKEN`."""
    sort = "0123456789" if answer.isdigit() else ascii_lowercase
    return "".join(draws.choice(sort) if draws.random() < MISTAKEN else letter for letter in answer)


def _place(endpoint: Endpoint) -> tuple[str, int, int]:
    # .../sessions/RUN.gGROUP.MEMBER.aATTEMPT/v1
    run, group, member, _ = endpoint.base_url.split("/")[-2].rsplit(".", 3)
    return run, int(group[1:]), int(member)
