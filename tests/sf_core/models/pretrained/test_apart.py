"""Tests of calls in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sf_core.models.pretrained import apart
from sf_core.models.pretrained.apart import call_in_subprocess
from sf_core.models.pretrained.needed_weights import UnknownModelError


def own_process(*_: object) -> int:
    print("whatever a library prints is no answer")
    return os.getpid()


def fail() -> None:
    raise UnknownModelError("there is no such model")


def end() -> None:
    os._exit(3)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    apart._ask.cache_clear()
    yield
    apart._ask.cache_clear()


@pytest.mark.usefixtures("without_torch")
def test_a_process_without_torch_asks_another_one_once() -> None:
    asked = call_in_subprocess(own_process, "x")
    assert asked != os.getpid()
    assert call_in_subprocess(own_process, "x") == asked != call_in_subprocess(own_process, "y")
    sizes = {"a": 1, "b": 2}
    assert call_in_subprocess(own_process, sizes) == call_in_subprocess(
        own_process, dict(reversed(sizes.items()))
    )


def test_a_process_that_has_torch_answers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert call_in_subprocess(own_process) == os.getpid()


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("known", [UnknownModelError, ValueError])
def test_what_it_raises_is_raised_here(known: type[ValueError]) -> None:
    with pytest.raises(ValueError, match=r"^there is no such model$") as raised:
        call_in_subprocess(fail, raises=[known])
    assert type(raised.value) is known


@pytest.mark.usefixtures("without_torch")
def test_a_process_that_ends_without_an_answer_is_told() -> None:
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        call_in_subprocess(end)


def test_what_a_command_says_of_a_policy_needs_no_torch_in_its_process_and_its_versions_ask_no_more(
    small_policy: str,
) -> None:
    program = """
import sys
from sf_core.cli import launch
from sf_core.config import RunConfig
from sf_core.models.pretrained import apart
from sf_core.stages.preflight.sizes import PolicySizes
from sf_core.training.teacher_folder import TeacherFolder
sizes = PolicySizes.of(RunConfig.model_validate({"policy": {"model": sys.argv[1]}}))
before = apart._ask.cache_info().misses
for weights in (None, sys.argv[1]):
    TeacherFolder(sys.argv[1], weights).check("policy", "copy it again")
print(sizes.parameters, "torch" in sys.modules, apart._ask.cache_info().misses - before)
"""
    command = [sys.executable, "-c", program, small_policy]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(told[0]) > 0 and told[1:] == ["False", "0"]
