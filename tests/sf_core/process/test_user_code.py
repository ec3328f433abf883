import functools
import importlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sf_core.process.user_code import is_own, own_place, place_of, returns_nothing
from sf_core.settings import load_object
from sf_core.types import Task

AGENT = """import json


def agent(task, endpoint):
    return json.loads(task)


def reward(task, answer):
    return undefined


class Callable:
    def __call__(self, task):
        return self.missing


def chained(task):
    try:
        reward(task, None)
    except NameError as error:
        raise ValueError("no reward") from error
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "mine_to_blame.py").write_text(AGENT, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module("mine_to_blame")
    sys.modules.pop("mine_to_blame", None)


def raised(function: Callable[..., Any], *args: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:
        function(*args)
    return caught.value


def test_the_place_is_the_users_line_and_not_that_of_a_library(mine: Any) -> None:
    error = raised(mine.agent, "{", None)

    assert isinstance(error, json.JSONDecodeError)
    assert own_place(error) == "mine_to_blame.py:5"


def test_a_file_elsewhere_is_named_whole(mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path.cwd()
    monkeypatch.chdir("/")

    assert own_place(raised(mine.reward, None, None)) == f"{str(folder)[1:]}/mine_to_blame.py:9"
    monkeypatch.chdir(Path(sys.prefix))
    assert own_place(raised(mine.reward, None, None)) == f"{folder}/mine_to_blame.py:9"


def test_of_errors_raised_from_one_another_it_is_that_of_the_first(mine: Any) -> None:
    assert own_place(raised(mine.chained, None)) == "mine_to_blame.py:9"


def test_an_error_of_ours_leads_to_the_users_error_that_caused_it(mine: Any) -> None:
    Path("broken_to_blame.py").write_text("LIMIT = 1\nlimit = LIMITS\n", encoding="utf-8")

    assert own_place(raised(load_object, "broken_to_blame:tasks")) == "broken_to_blame.py:2"


def test_of_code_that_python_cannot_read_it_is_the_line_of_that_code(mine: Any) -> None:
    Path("unreadable_to_blame.py").write_text("LIMIT = 1\ndef tasks(:\n", encoding="utf-8")

    error = raised(importlib.import_module, "unreadable_to_blame")

    assert own_place(error) == "unreadable_to_blame.py:2"


def test_code_that_was_never_in_a_file_leads_to_who_ran_it(mine: Any) -> None:
    Path("evaluating.py").write_text("def agent(task):\n    return eval(task)\n", encoding="utf-8")
    evaluating = importlib.import_module("evaluating")

    assert own_place(raised(evaluating.agent, "1 +")) == "evaluating.py:2"
    assert own_place(raised(evaluating.agent, "1 / 0")) == "evaluating.py:2"


def test_an_error_of_ours_alone_has_no_place() -> None:
    code = """
from sf_core.settings import load_object
from sf_core.process.user_code import own_place
try:
    load_object("json:nothing")
except ValueError as error:
    print(repr(own_place(error)))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, encoding="utf-8")

    assert told.stdout == "''\n"


def test_the_program_of_ours_is_not_the_users_code() -> None:
    assert not is_own(os.path.join(sysconfig.get_path("scripts"), "sf"))


def test_a_function_is_named_by_its_definition(mine: Any) -> None:
    assert place_of(mine.reward) == "mine_to_blame.py:8"
    assert place_of(functools.partial(mine.reward, None)) == "mine_to_blame.py:8"
    assert place_of(mine.Callable()) == "mine_to_blame.py:12"
    assert place_of(mine.Callable().__call__) == "mine_to_blame.py:13"
    assert place_of(len) == ""
    assert "sf_core/types.py:" in place_of(Task)


class Agents:
    async def asks(self, task: Any) -> Any:
        await task
        return

    async def answers(self, task: Any) -> Any:
        if task:
            return None
        return await task

    def says_none(self, task: Any) -> Any:
        def inner() -> str:
            return "of another function"

        inner()
        return None

    def yields(self, task: Any) -> Any:
        yield task


class Called:
    def __call__(self, task: Any) -> None: ...


def test_a_function_that_never_returns_a_value_is_known() -> None:
    agents = Agents()

    def nothing(task: Any) -> None: ...

    @functools.wraps(nothing)
    def wrapped(task: Any) -> Any:
        return nothing(task)

    for function in (nothing, wrapped, functools.partial(nothing, 1), agents.asks, agents.says_none):
        assert returns_nothing(function), function
    for function in (agents.answers, agents.yields, lambda task: None, Called(), Called, len, eval("abs")):
        assert not returns_nothing(function), function
