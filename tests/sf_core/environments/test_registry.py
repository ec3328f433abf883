"""Environments by name: the functions of a run, and one sentence for what does not exist."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sf_core.config import EnvironmentConfig, RunConfig
from sf_core.config.validation import ConfigError, validate_config
from sf_core.environments.environment import Demonstration, Environment
from sf_core.environments.quickstart import Quickstart
from sf_core.environments.registry import (
    agent_of,
    check_host,
    environment_of,
    parts_of,
    reward_of,
    tasks_of,
)
from sf_core.environments.splits import Split
from sf_core.process.import_path import NAMES
from sf_core.settings import Settings
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from sf_core.testing.environments import EnvironmentTests
from sf_core.types import Endpoint, Task
from tests.bench.refusals import check_sentence

ROOT = Path(__file__).parents[3]


class Amounts(Settings):
    most: int = 9


class Sums(Environment):
    """An environment of the user's."""

    least: int = 0
    amounts: Amounts = Amounts()

    def tasks(self, split: Split, index: int) -> Task:
        number = self.least + (index if split == "train" else -1 - index)
        return Task(f"{split}-{index}", "sums", f"{number}+{number}?", str(2 * number))

    def agent(self, task: Task, endpoint: Endpoint) -> str:
        return task.answer

    async def reward(self, task: Task, answer: str) -> float:
        return float(answer == task.answer)


class Elsewhere(Sums):
    def why_not_here(self) -> str:
        return "no browser is installed"


class Unfinished(Environment):
    def tasks(self, split: Split, index: int) -> Task:
        raise NotImplementedError


def my_reward(task: Task, answer: str) -> float:
    return 0.0


class TestContractOfTheUsers(EnvironmentTests):
    environment = Sums()


def shop_of_the_docs() -> Environment:
    page = Path(__file__).parents[3] / "docs" / "guides" / "agents" / "environments.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    [code] = [block for block in blocks if "class Shop" in block]
    exec(code, found := {"__name__": "my_shop"})
    return found["Shop"](goods=300)


class TestContractOfTheDocs(EnvironmentTests):
    environment = shop_of_the_docs()


def setting(**fields: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**fields)


def named(name: type, **settings: Any) -> EnvironmentConfig:
    return setting(name=f"{__name__}:{name.__name__}", settings=settings)


def test_a_run_that_names_nothing_has_the_quickstart() -> None:
    environment = environment_of(RunConfig().environment)
    assert isinstance(environment, Quickstart)
    assert tasks_of(setting())("train", 3) == environment.tasks("train", 3)
    assert (agent_of(setting()), reward_of(setting())) == (environment.agent, environment.reward)


def test_a_class_of_the_users_is_an_environment_with_settings() -> None:
    config = named(Sums, least=3)
    assert tasks_of(config)("train", 0).prompt == "3+3?"
    assert environment_of(config) is environment_of(named(Sums, least=3))
    assert environment_of(config) != environment_of(named(Sums, least=4))


def test_functions_replace_those_of_the_environment() -> None:
    config = setting(name=f"{__name__}:Sums", reward=f"{__name__}:my_reward")
    assert reward_of(config) is my_reward
    assert tasks_of(config)("train", 2).answer == "4"


def test_what_has_one_order_of_tasks_has_no_parts() -> None:
    assert parts_of(named(Sums)) == []
    with pytest.raises(ValueError, match=r"^Sums has no part 'hard'; it has no parts$"):
        Sums().task("train", 0, "hard")
    assert Sums().task("train", 3) == Sums().tasks("train", 3)


def test_tasks_of_the_users_have_no_parts() -> None:
    config = setting(tasks="sf_core.environments.quickstart:tasks")
    assert (parts_of(setting()), parts_of(config)) == (["spell_backward", "calculator"], [])
    with pytest.raises(TypeError):
        tasks_of(config)("train", 0, "calculator")


def test_a_run_that_names_all_its_functions_needs_no_environment() -> None:
    names = {part: f"{__name__}:my_reward" for part in ("tasks", "agent", "reward")}
    config = setting(name="none such", **names)
    assert {inspect.unwrap(tasks_of(config)), agent_of(config), reward_of(config)} == {my_reward}


@pytest.mark.parametrize("replaced", ["agent", "reward"])
def test_a_host_must_do_what_the_environment_does_itself(replaced: str) -> None:
    config = named(Elsewhere).model_copy(update={replaced: f"{__name__}:my_reward"})
    with pytest.raises(ValueError, match=r"^environment\.name: .*:Elsewhere: no browser is installed$"):
        check_host(config)
    check_host(setting(name=config.name, agent=f"{__name__}:my_reward", reward=f"{__name__}:my_reward"))
    check_host(named(Sums))


def test_the_configuration_of_an_earlier_run_means_what_it_meant() -> None:
    parts = {part: f"sf_core.environments.quickstart:{part}" for part in ("tasks", "agent", "reward")}
    old = setting(**parts)
    new = setting()
    for index in range(4):
        task = tasks_of(old)("holdout", index)
        assert task == tasks_of(new)("holdout", index)
        assert reward_of(old)(task, task.answer) == {"answer": 1.0}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            setting(name="quickstat"),
            "environment.name: unknown environment 'quickstat'; use one of quickstart, ",
        ),
        (setting(name="nowhere:Sums"), "environment.name: nowhere:Sums: cannot import nowhere"),
        (
            setting(name="json:JSONDecoder"),
            "environment.name: json:JSONDecoder is not a class that inherits sf_core.environments.",
        ),
        (named(Unfinished), "Unfinished does not define agent, reward"),
        (
            named(Sums, last=1),
            "environment.settings.last: unknown key; allowed here: least, amounts",
        ),
        (
            named(Sums, least="x", amounts={"most": "y", "few": 1}),
            "got 'x'; environment.settings.amounts.most: input should be a valid integer, unable to parse "
            "string as an integer, got 'y'; environment.settings.amounts.few: unknown key; allowed here: mo",
        ),
        (setting(settings={"size": 1}), "environment.settings.size: unknown key; allowed here: parts"),
    ],
)
def test_what_cannot_be_used_is_named(config: EnvironmentConfig, sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        tasks_of(config)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_settings_are_what_json_can_keep(value: object) -> None:
    with pytest.raises(ConfigError, match=r"environment\.settings: the values must be valid JSON"):
        validate_config({"environment": {"settings": {"size": value}}})


def test_what_has_no_demonstrations_cannot_warm_start_a_policy() -> None:
    class Shown(Sums):
        def demonstrate(self, index: int) -> Demonstration:
            return Demonstration([])

    assert not Sums().has_demonstrations and Shown().has_demonstrations
    environment = named(Sums).model_dump()
    with pytest.raises(ValueError) as refused:
        preflight(Facts(RunConfig.model_validate({"environment": environment})))
    assert str(refused.value).startswith(f"policy.warmstart: the environment {__name__}:Sums has no demons")
    assert "set policy.warmstart to null" in str(refused.value)
    for warmstart in (None, {"steps": 0}):
        policy = {"warmstart": warmstart}
        preflight(Facts(RunConfig.model_validate({"environment": environment, "policy": policy})))


def run_python(path: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with the packages at this path."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, encoding="utf-8"
    )


def test_an_example_is_found_from_any_folder(tmp_path: Path) -> None:
    code = """
import sys
from sf_core.config import EnvironmentConfig
from sf_core.environments.registry import ROOT, environment_of
# as in an editable install, which makes our packages importable and not their folder
sys.path.remove(str(ROOT))
for name in ("programs", "repair"):
    print(type(environment_of(EnvironmentConfig(name=name))).__name__)
"""
    done = run_python(ROOT, tmp_path, "-c", code)
    assert done.stdout.split() == ["Programs", "Repair"], done.stderr


def test_an_example_is_refused_where_only_the_package_is_installed(tmp_path: Path) -> None:
    for package in NAMES:
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / "installed" / package, ignore=without)
    (tmp_path / "run.yaml").write_text("environment: {name: repair}", encoding="utf-8")
    done = run_python(tmp_path / "installed", tmp_path, "-m", "sf_core", "plan", "run.yaml")
    assert done.returncode == 2, done.stdout
    sentence = done.stderr.removeprefix("error: ")
    check_sentence(sentence, "repair is an example", "examples.repair.environment", "PYTHONPATH")
