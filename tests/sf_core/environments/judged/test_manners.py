"""Sentences that a judge calls polite or not, and those that it is not asked about."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sf_core.config import EnvironmentConfig
from sf_core.environments.judged.manners import Manners, ask_about, names_favour
from sf_core.environments.registry import environment_of, reward_of
from sf_core.testing.environments import EnvironmentTests
from sf_core.types import Task


class Pleased:
    """Says yes to whoever says please, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def choose(self, messages: Any, words: Sequence[str], item: str = "") -> Mapping[str, float]:
        self.asked.append((messages, list(words), item))
        yes = 0.75 if "please" in messages[-1]["content"] else 0.25
        return {"yes": yes, "no": 1 - yes}


def reward_by(judge: Pleased, task: Task, answer: Any) -> Mapping[str, float]:
    return asyncio.run(Manners().reward(task, answer, {"manners": judge}))


class TestContract(EnvironmentTests):
    environment = environment_of(EnvironmentConfig(name="manners"))

    def _reward(self, task: Task, answer: str) -> Mapping[str, float]:
        return reward_by(Pleased(), task, answer)


TASK = Task("t", "manners", "Ask.", metadata={"favour": "turn the music down"})


def test_a_judge_says_how_likely_it_is_that_a_sentence_is_polite() -> None:
    judge = Pleased()
    assert reward_by(judge, TASK, "Could you turn the music down, please?") == {"polite": 0.75}
    rude = {"text": "Turn that\nmusic down at once!", "is_whole": True}
    assert reward_by(judge, TASK, rude) == {"polite": 0.25}
    messages, words, item = judge.asked[1]
    assert (words, item) == (["yes", "no"], "polite")
    question = "Sentence: Turn that music down at once!\nPolite (yes or no)?"
    assert messages[-1] == {"role": "user", "content": question}
    assert [message["role"] for message in messages] == ["user", "assistant"] * 4 + ["user"]
    assert {message["content"] for message in messages[1::2]} == {"yes", "no"}


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "please, the music!",
        "Would you please be so kind?",
        {"text": "Please turn the music down a", "is_whole": False},
    ],
)
def test_a_judge_is_not_asked_what_a_rule_can_tell(answer: Any) -> None:
    judge = Pleased()
    assert reward_by(judge, TASK, answer) == {"polite": 0.0} and judge.asked == []


@pytest.mark.parametrize(
    ("text", "favour", "is_named"),
    [
        ("Would you walk the (dog) for me?", "walk the dog", True),
        ("Please wait for me until tomorrow, thanks", "wait until noon", False),
        ("I need translations of pages, dear teacher", "translate a page", True),
        ("Walk a little, down the road", "walk the dog", False),
    ],
)
def test_a_favour_is_named_by_what_it_is_about(text: str, favour: str, is_named: bool) -> None:
    assert names_favour(text, favour) == is_named


def test_its_reward_is_given_the_judges_of_the_run() -> None:
    judges = {"manners": {"url": "http://127.0.0.1:1/v1"}}
    config = EnvironmentConfig.model_validate({"name": "manners", "judges": judges})
    assert "judges" in inspect.signature(reward_of(config)).parameters
    assert ask_about("x") == ask_about("x")
