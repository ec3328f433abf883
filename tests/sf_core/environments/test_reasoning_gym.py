"""Every dataset of reasoning-gym by its name, and answers that its scorers must not evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import CURRICULA, DATASETS

from sf_core.config import EnvironmentConfig
from sf_core.environments.reasoning_gym import EVALUATED, Dataset, ReasoningGym, is_formula, is_literal
from sf_core.environments.registry import environment_of, parts_of, tasks_of
from sf_core.testing.environments import EnvironmentTests

NEEDS_MORE = {"composite": "is a mixture of others, and needs their names"}
"""Datasets that cannot be made at their defaults."""

NO_GOLD_ANSWER = dict.fromkeys(
    ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"),
    "has many right answers, and its generator gives none",
)
"""Datasets whose own answer earns less than 1."""

REFUSED_LEVELS = {"caesar_cipher": (2, 3), "knight_swap": (0, 1, 2, 3), "modulo_grid": (1,), "survo": (2, 3)}
"""Levels of the library's curricula that its own checks refuse."""

SLOW = {"acre", "futoshiki", "knight_swap", "intermediate_integration", "arc_agi"}

NAMES = [pytest.param(name, marks=[pytest.mark.nightly] if name in SLOW else []) for name in sorted(DATASETS)]

GARBAGE = ("", "\x00 \n<|im_end|> 数", "9" * 5000, "[[1, 2]", "{}", "null", "A+1", "(((", "x**2")


class TestContract(EnvironmentTests):
    environment = ReasoningGym(
        datasets={"spell_backward": {"min_word_len": 3}, "basic_arithmetic": {}, "leg_counting": {"level": 1}}
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_dataset_makes_tasks_and_scores_them(name: str) -> None:
    if name in NEEDS_MORE:
        with pytest.raises(ValueError):
            Dataset(name).settings()
        return
    environment = ReasoningGym(datasets={name: {}}, held_out=1)
    held_out = environment.tasks("holdout", 0)
    trained = environment.tasks("train", 0)
    assert trained == ReasoningGym(datasets={name: {}}, held_out=1).tasks("train", 0)
    assert held_out.prompt and trained.prompt and held_out.prompt != trained.prompt
    for task in (held_out, trained):
        earned = environment.reward(task, task.answer)
        assert (earned == 1.0) == (name not in NO_GOLD_ANSWER), earned
        assert bool(task.answer) == (name not in NO_GOLD_ANSWER)
    for answer in GARBAGE:
        assert 0 <= environment.reward(trained, answer) <= 1
    assert (environment.demonstrate(0) is None) == (name in NO_GOLD_ANSWER)


@pytest.mark.parametrize("name", sorted(CURRICULA.keys() - NEEDS_MORE))
def test_every_level_of_difficulty_is_the_librarys(name: str) -> None:
    refused = REFUSED_LEVELS.get(name, ())
    for level in refused:
        with pytest.raises(ValueError, match=f"^{name}: "):
            Dataset(name, level=level).settings()
    for level in {0, 1, 2, 3}.difference(refused):
        assert Dataset(name, level=level).settings().size


def test_parts_are_equal_and_take_turns() -> None:
    environment = ReasoningGym(datasets={"spell_backward": {}, "basic_arithmetic": {}, "gcd": {}})
    kinds = [environment.tasks("train", index).environment for index in range(30)]
    assert kinds == ["spell_backward", "basic_arithmetic", "gcd"] * 10


def test_its_datasets_are_its_parts() -> None:
    datasets: dict[str, dict[str, Any]] = {"spell_backward": {"min_word_len": 4}, "gcd": {}}
    config = EnvironmentConfig(name="reasoning_gym", settings={"datasets": datasets, "held_out": 2})
    assert parts_of(config) == ["spell_backward", "gcd"]
    tasks = tasks_of(config)
    for index in range(4):
        assert tasks("train", 2 * index) == tasks("train", index, "spell_backward")
        assert tasks("train", 2 * index + 1) == tasks("train", index, "gcd")
    assert tasks("train", 3, "gcd") == Dataset("gcd", 2).task("train", 3)


def test_parameters_reach_the_generator() -> None:
    words = Dataset("spell_backward", min_word_len=9, max_word_len=9)
    assert {len(words.task("train", index).answer) for index in range(20)} == {9}
    level = Dataset("spell_backward", level=2, min_word_len=2).settings()
    assert (level.min_word_len, level.max_word_len > 3) == (2, True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "environment.settings.datasets: field required"),
        ({"datasets": {}}, "environment.settings.datasets: expected at least 1 item, got {}"),
        ({"datasets": {"spel_backward": {}}}, "no dataset 'spel_backward'; use for example spell_backward"),
        (
            {"datasets": {"gcd": {"max_amount": 3}}},
            "gcd has no parameter max_amount; use one of level, max_num",
        ),
        ({"datasets": {"gcd": {"seed": 3}}}, "gcd has no parameter seed; use one of level, max_num"),
        (
            {"datasets": {"spell_backward": {"min_word_len": 0}}},
            "environment.settings.datasets: spell_backward: min_word_len must be positive",
        ),
        ({"datasets": {"gcd": {"max_value": "x"}}}, "environment.settings.datasets: gcd: "),
        ({"datasets": {"gcd": {"level": "hard"}}}, "gcd has no level 'hard'"),
        ({"datasets": {"acre": {"level": 1}}}, "acre has no level 1"),
        ({"datasets": {"composite": {}}}, "composite: "),
        ({"datasets": {"gcd": {}}, "held_out": 0}, "environment.settings.held_out: input should be greater"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        environment_of(EnvironmentConfig(name="reasoning_gym", settings=settings))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", sorted(EVALUATED))
def test_no_answer_runs_code(name: str, tmp_path: Path) -> None:
    environment = ReasoningGym(datasets={name: {}}, held_out=1)
    task = environment.tasks("train", 0)
    mark = tmp_path / "ran"
    spelled = "+".join(f"chr({ord(letter)})" for letter in f"open({str(mark)!r}, 'w')")
    for code in (f"open({str(mark)!r}, 'w')", f"eval({spelled})", f"eval({spelled})!", f"[{code_of(mark)}]"):
        assert environment.reward(task, code) == 0.0
        assert not mark.exists()


def code_of(mark: Path) -> str:
    return f"().__class__.__base__.__subclasses__() and open({str(mark)!r}, 'w')"


def test_partial_credit_for_lists_stays() -> None:
    environment = ReasoningGym(datasets={"string_insertion": {}}, held_out=1)
    task = environment.tasks("train", 0)
    assert environment.reward(task, str(list(task.answer))) == 0.1


@pytest.mark.parametrize(
    ("answer", "formula", "literal"),
    [
        ("2*x**3/3 - (x**2 + 1)**4 + C", True, False),
        ("exp(x)*sin(2*x) + sqrt(3)", True, False),
        ("-3.5e2", True, True),
        ("[['Q', '_'], ['_', 'Q']]", False, True),
        ("9**9**9**9", False, False),
        ("((9**50)**50)**50", False, False),
        ("9**(99*99*99)", False, False),
        ("'a'*10**10", False, False),
        ("1 << 10", False, False),
        ("exp(x, evaluate=False)", False, False),
        ("x.y", False, False),
        ("lambda: 1", False, False),
        ("99999999!", False, False),
        ("+".join(["1"] * 2000), False, False),
        ("(" * 500 + "1" + ")" * 500, False, False),
    ],
)
def test_what_may_be_evaluated(answer: str, formula: bool, literal: bool) -> None:
    assert (is_formula(answer), is_literal(answer)) == (formula, literal)
