"""The environment `instructions`: what each kind accepts and refuses, and how tasks and rewards are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.config import EnvironmentConfig
from sf_core.environments.instructions import constraints
from sf_core.environments.instructions.constraints import KINDS
from sf_core.environments.instructions.environment import Instructions, is_about
from sf_core.environments.registry import environment_of
from sf_core.testing.environments import EnvironmentTests

CURLY = "\N{LEFT DOUBLE QUOTATION MARK}a\N{RIGHT DOUBLE QUOTATION MARK}"

KEPT_AND_BROKEN: Mapping[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "keywords": ({"words": ["moon", "red"]}, ["A red Moon.", "The moon is red!"], ["Moonlight on a bed."]),
    "forbidden_words": ({"words": ["the"]}, ["Other cats.", ""], ["The cat.", "See the."]),
    "keyword_frequency": (
        {"word": "red", "n": 2},
        ["Red, red.", "red Red red"],
        ["redder", "reds and blues"],
    ),
    "letter_frequency": ({"letter": "b", "n": 3}, ["Bobby bears"], ["A cat", ""]),
    "at_most_words": ({"n": 3}, ["one two three", ""], ["one two three four"]),
    "at_least_words": ({"n": 3}, ["one two three"], [""]),
    "placeholders": ({"n": 1}, ["Dear [name],"], ["Dear name", "[]"]),
    "highlights": ({"n": 1}, ["a *very* good", "**bold**"], ["2 * 3", "* item"]),
    "bullets": ({"n": 2}, ["- one\n- two", "* a\n  * b"], ["one - two", "-one"]),
    "capital_words": ({"n": 1}, ["a BIG dog"], ["A big dog"]),
    "first_words": ({"phrase": "Long ago"}, ["Long ago, cats", '"long ago'], ["Ago long", "So long ago"]),
    "last_words": ({"phrase": "That is all"}, ["Cats. That is all."], ["That is all about cats"]),
    "postscript": ({}, ["Bye. P.S. See you"], ["PS see you"]),
    "title": ({}, ["<<Cats>> are fine"], ["<Cats>", "<<>>", "<< >>"]),
    "json": ({}, ['{"a": 1}', '```json\n{"a": 1}\n```'], ["[1]", "{a: 1}", "cats"]),
    "quotation": (
        {},
        ['"cats"', CURLY],
        ['"cats', '""'],
    ),
    "lower_case": ({}, ["cats, 7"], ["Cats"]),
    "upper_case": ({}, ["CATS, 7"], ["CATs"]),
    "no_comma": ({}, ["cats and dogs"], ["cats, dogs"]),
    "question": ({}, ["Cats?", '"Cats?"'], ["Cats.", "Cats? Yes"]),
}


class TestContract(EnvironmentTests):
    environment = Instructions()


def test_every_kind_has_answers_of_both_sorts_here() -> None:
    assert KEPT_AND_BROKEN.keys() == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_tells_answers_that_keep_it_from_those_that_break_it(name: str) -> None:
    parameters, kept, broken = KEPT_AND_BROKEN[name]
    assert [KINDS[name].check(answer, parameters) for answer in kept] == [1.0] * len(kept)
    assert [KINDS[name].check(answer, parameters) for answer in broken] == [0.0] * len(broken)


@pytest.mark.parametrize(
    ("name", "parameters", "answer"),
    [
        ("keywords", {"words": ["moon", "red"]}, "The moon."),
        ("keyword_frequency", {"word": "red", "n": 2}, "A red one."),
        ("at_least_words", {"n": 4}, "one two"),
        ("bullets", {"n": 2}, "- one"),
    ],
)
def test_half_of_a_constraint_is_worth_half(name: str, parameters: dict[str, Any], answer: str) -> None:
    assert KINDS[name].check(answer, parameters) == 0.5


@given(st.integers(0, 2**40), st.sampled_from(["train", "holdout"]))
def test_tasks_are_functions_of_their_index_and_can_be_told_and_scored(index: int, split: Any) -> None:
    environment = Instructions()
    task = environment.tasks(split, index)
    assert task == environment.tasks(split, index)
    drawn = task.metadata["constraints"]
    assert 1 <= len(drawn) <= 3
    assert all(KINDS[name].describe(its) in task.prompt for name, its in drawn.items())
    scores = environment.reward(task, {"text": task.prompt, "is_whole": True})
    assert scores.keys() == drawn.keys() and 0 <= sum(scores.values()) <= 1


@pytest.mark.parametrize("pool", [constraints.subjects, constraints.keywords, constraints.phrases])
def test_held_out_tasks_are_made_of_other_words(pool: Any) -> None:
    train = set(pool("train"))
    held_out = set(pool("holdout"))
    assert train and held_out and not train & held_out


def test_a_text_that_keeps_its_constraints_earns_everything_and_one_about_nothing_earns_nothing() -> None:
    environment = Instructions(kinds=("no_comma", "question"), constraints=(2, 2))
    task = environment.tasks("train", 0)
    subject = task.metadata["subject"]

    def earned(text: str, is_whole: bool = True) -> dict[str, float]:
        return environment.reward(task, {"text": text, "is_whole": is_whole})

    assert earned(f"Do you really like {subject}?") == {"no_comma": 0.5, "question": 0.5}
    assert earned(f"Well, do you really like {subject}?") == {"no_comma": 0.0, "question": 0.5}
    for nothing in (
        "",
        "?",
        f"{subject}?",
        "Do you like nothing at all?",
        f"This sentence is about {subject}?",
    ):
        assert not any(earned(nothing).values())
    assert not any(earned(f"Do you really like {subject}?", is_whole=False).values())


@pytest.mark.parametrize(
    ("text", "subject", "expected"),
    [
        ("A wolf runs in the night.", "wolves", True),
        ("A cat runs in the night.", "wolves", False),
        ("A cherry is small and red.", "cherries", True),
        ("Wolves run.", "wolves", False),
        ("This sentence is about wolves indeed.", "wolves", False),
    ],
)
def test_what_a_text_is_about(text: str, subject: str, expected: bool) -> None:
    assert is_about(text, subject) is expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": ["no_comas"]}, "no_comas"),
        ({"constraints": [2, 1]}, "expected 1 <= minimum <= maximum"),
        ({"kinds": ["json"], "constraints": [1, 2]}, "the number of kinds"),
        ({"answers": 0}, "environment.settings.answers"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        environment_of(EnvironmentConfig(name="instructions", settings=settings))


def test_a_complaint_names_what_is_broken_and_what_is_kept_is_not_repeated() -> None:
    environment = Instructions(kinds=("no_comma", "question"), constraints=(2, 2), answers=2)
    task = environment.tasks("train", 0)
    subject = task.metadata["subject"]
    told = environment._explain_broken(task, {"text": f"Do you, too, like {subject}?", "is_whole": True})
    assert told == "That is not right. Do not use any commas."
    off_topic = environment._explain_broken(task, {"text": "Do you like nothing at all?", "is_whole": True})
    assert off_topic.startswith(f"That is not right. Write a sentence about {subject}.")
    assert environment._explain_broken(task, {"text": f"Do you all like {subject}?", "is_whole": True}) == ""
