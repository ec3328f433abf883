"""Environments of verifiers: their rows as tasks, their rollouts over HTTP, their rubrics as reward."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from sf_core.config import EnvironmentConfig
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.environments.registry import environment_of
from sf_core.environments.verifiers import Verifiers
from sf_core.testing.environments import EnvironmentTests
from tests.bench import runners
from tests.bench.dataplane import planes

PAD = "verifiers_pad"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("tests/sf_core/environments")


def pad(**arguments: Any) -> Verifiers:
    return Verifiers(name=PAD, arguments=arguments)


class TestContract(EnvironmentTests):
    num_tasks = 8

    @pytest.fixture(autouse=True)
    def _of(self, _on_the_path: None) -> None:
        self.environment = pad()


def test_the_rows_of_an_environment_are_tasks_and_its_splits_stay_apart() -> None:
    environment = pad()
    first = environment.tasks("train", 0)
    held_out = environment.tasks("holdout", 7)
    assert (first.prompt, first.answer) == ("How long is train?", "5")
    assert (held_out.prompt, held_out.answer) == ("How long is evalxxxxxxx?", "11")
    # the 41st is held out too
    assert environment.tasks("train", 40) == first
    with pytest.raises(ValueError, match=f"held-out index 8: {PAD} has 8 held-out tasks"):
        environment.tasks("holdout", 8)


def test_rows_are_held_out_where_an_environment_has_none_to_evaluate_on() -> None:
    environment = Verifiers(name=PAD, arguments={"evaluated": False}, held_out=5)
    assert environment.tasks("holdout", 4).prompt == "How long is trainxxxx?"
    assert environment.tasks("train", 0).prompt == "How long is trainxxxxx?"
    with pytest.raises(ValueError, match=f"{PAD} has 41 rows, too few for held_out 128"):
        pad(evaluated=False).tasks("train", 0)


def test_loading_one_leaves_the_signals_of_the_process_alone() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    pad(rows=39).tasks("train", 0)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def run(plane: planes.ServedPlane, environment: Verifiers) -> list[float]:
    rewards: list[float] = []

    async def reward(task: Any, answer: Any) -> float:
        rewards.append(await environment.reward(task, answer))
        return rewards[-1]

    parts = {"tasks": environment.tasks, "agent": environment.agent, "reward": reward}
    runners.run_until_ready(plane, runners.make_runner(plane.url, concurrency=1, **parts))
    return rewards


def test_its_rollout_is_the_agent_and_its_rubric_the_reward(
    plane_process: planes.ServedPlane, renderer: Renderer
) -> None:
    plane_process.register(group_size=1, groups_per_batch=2, num_batches=1)
    plane_process.connect(planes.answering(renderer, "5", "it is 6"))
    assert run(plane_process, pad()) == [1.5, 0.0]
    assert plane_process.get("/runs/run")["counters"].get("failed_sessions", 0) == 0


def test_its_tools_are_called_in_a_session_of_several_turns(
    plane_process: planes.ServedPlane, renderer: Renderer
) -> None:
    plane_process.register(group_size=1, groups_per_batch=1, num_batches=1, max_tokens=100)
    call = '<tool_call>\n{"name": "count_letters", "arguments": {"word": "train"}}\n</tool_call>'
    plane_process.connect(planes.answering(renderer, call, "5"))
    assert run(plane_process, pad(kind="tool")) == [1.5]


async def test_a_text_of_another_agent_is_scored_by_the_rubric() -> None:
    environment = pad()
    task = environment.tasks("train", 2)
    assert [await environment.reward(task, answer) for answer in ("7", "8", "seven")] == [1.5, 0.5, 0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "environment.settings.name: field required"),
        (
            {"name": "no-such"},
            "environment.settings.name: the module 'no_such' of the verifiers environment 'no-such' is",
        ),
        (
            {"name": PAD, "argument": {}},
            "environment.settings.argument: unknown key; allowed here: name, arg",
        ),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        environment_of(EnvironmentConfig(name="verifiers", settings=settings))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_what_an_environment_refuses_is_told() -> None:
    with pytest.raises(RuntimeError, match=rf"Failed to load environment '{PAD}': .*unexpected keyword"):
        pad(colour="red").tasks("train", 0)


def test_where_the_library_is_missing_it_is_said_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['verifiers'] = None\n"
        "from sf_core.environments.verifiers import Verifiers\n"
        "try: Verifiers(name='x')\n"
        "except ValueError as error: print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, encoding="utf-8"
    ).stdout
    assert "the package verifiers is not installed here: install the extra seamlessflow[verifiers]" in said
