from __future__ import annotations

import json
from random import Random

import pytest

from examples.programs.environment import Programs, program_in
from examples.programs.operations import KINDS, OPERATIONS, Chain, draw_chain, draw_values
from sf_core.config.run_config import EnvironmentConfig
from sf_core.environments.functions.judge import HiddenTests
from sf_core.environments.registry import check_host
from sf_core.environments.splits import split_of
from sf_core.testing.environments import EnvironmentTests


class TestContract(EnvironmentTests):
    environment = Programs(tests=3)
    num_scored = 1


def test_a_host_without_a_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        "programs": "examples.programs",
        "repair": "examples.repair",
        "repositories": "sf_core.environments.repositories",
    }
    for name, module in places.items():
        paths = {"dataset": "d.jsonl", "repositories": "r"} if name == "repositories" else {}
        config = EnvironmentConfig(name=name, settings=paths)
        check_host(config)
        monkeypatch.setattr(f"{module}.environment.why_no_sandbox", lambda *image: "there is no bubblewrap")
        with pytest.raises(ValueError, match=f"^environment.name: {name}: there is no bubblewrap$"):
            check_host(config)


@pytest.mark.parametrize("difficulty", range(1, 6))
async def test_a_solution_passes_its_tests_and_examples(difficulty: int) -> None:
    programs = Programs(difficulty=difficulty, reward_for="all")
    for split in ("train", "holdout"):
        task = programs.tasks(split, 7)
        hidden = HiddenTests.from_text(task.answer)
        answer = f"Certainly:\n```python\n{hidden.solution}```\nIt does what you asked for."
        assert await programs.reward(task, answer) == 1.0
        assert await programs.reward(task, hidden.solution) == 1.0
        found: dict[str, object] = {}
        exec(hidden.solution, found)
        for line in task.prompt.splitlines()[-2:]:
            call, _, value = line.partition(" returns ")
            assert eval(call, found) == eval(value)


async def test_what_does_something_else_earns_less() -> None:
    programs = Programs(difficulty=3)
    for index in range(3):
        task = programs.tasks("train", index)
        assert await programs.reward(task, "def solve(value): return value") < 1.0
        assert await programs.reward(task, "solve = 5") == 0.0


def test_no_training_function_does_what_a_held_out_one_does() -> None:
    for difficulty in (1, 3):
        programs = Programs(difficulty=difficulty)
        tests = {
            split: {programs.tasks(split, index).answer for index in range(300)}
            for split in ("train", "holdout")
        }
        # the same behaviour has the same tests, whatever the operations
        calls = {split: {json.dumps(json.loads(text)["returns"]) for text in tests[split]} for split in tests}
        assert not calls["train"] & calls["holdout"]


def test_hidden_tests_are_none_of_the_examples() -> None:
    task = Programs(difficulty=2, tests=20).tasks("train", 3)
    for [value] in HiddenTests.from_text(task.answer).calls:
        assert f"solve({value!r})" not in task.prompt


def test_difficulty_is_the_number_of_steps() -> None:
    for difficulty in range(1, 6):
        prompt = Programs(difficulty=difficulty).tasks("train", 0).prompt
        assert f"\n{difficulty}. " in prompt and f"\n{difficulty + 1}. " not in prompt


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.says)
def test_an_operation_gives_what_it_says_for_all_that_it_takes(operation: object) -> None:
    kinds = {"list": list, "text": str, "number": int}
    [operation] = [each for each in OPERATIONS if each is operation]
    chain = Chain((operation.with_number(3),))
    for value in draw_values(Random(0), operation.takes, 50):
        assert isinstance(chain(value), kinds[operation.gives])
    assert operation.takes in KINDS


def test_each_operation_of_a_chain_changes_something() -> None:
    twice = next(each for each in OPERATIONS if each.takes == "list" and each.code == "sorted(value)")
    assert Chain((twice,)).is_telling and not Chain((twice, twice)).is_telling
    assert all(draw_chain(Random(seed), 4).is_telling for seed in range(20))


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("first\n```\nx = 1\n```\nthen\n```py\nx = 2\n```\n", "x = 2\n"),
        ("```python\nx = 1", "```python\nx = 1"),
        ("", ""),
    ],
)
def test_the_last_fenced_block_is_the_program(answer: str, program: str) -> None:
    assert program_in(answer) == program


def test_a_key_is_of_one_split_and_one_in_five_is_held_out() -> None:
    held_out = [key for key in range(1000) if split_of(str(key)) == "holdout"]
    assert 150 < len(held_out) < 250
