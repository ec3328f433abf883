"""Which judges a run can ask, and what is said of those that it cannot."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from sf_core.config import RunConfig
from sf_core.process.user_code import place_of
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from sf_core.types import Task
from tests.bench.commands import sf
from tests.bench.refusals import check_sentence

AT_URL = {"quality": {"url": "http://127.0.0.1:1/v1"}}


def asks(task: Task, answer: Any, judges: Any) -> float:
    return 0.0


def may_ask(task: Task, answer: Any, judges: Any = None) -> float:
    return 0.0


def may_ask_of_all(task: Task, answers: list[Any], *, judges: Any = None) -> list[float]:
    return [0.0 for _ in answers]


def asks_nobody(task: Task, answer: Any) -> float:
    return 0.0


def judged(judges: dict[str, Any], **functions: Any) -> RunConfig:
    named = {name: f"{__name__}:{function.__name__}" for name, function in functions.items()}
    return RunConfig.model_validate({"environment": {"judges": judges} | named})


def refusal(config: RunConfig) -> str:
    with pytest.raises((ValueError, OSError)) as refused:
        preflight(Facts(config))
    return str(refused.value)


@pytest.mark.parametrize(
    "functions",
    [
        {"reward": asks},
        {"reward": may_ask},
        {"group_reward": may_ask_of_all},
        {"reward": asks_nobody, "group_reward": may_ask_of_all},
    ],
)
def test_judges_that_one_function_asks_are_taken(functions: dict[str, Any]) -> None:
    preflight(Facts(judged(AT_URL, **functions)))


def test_a_function_that_may_ask_judges_can_do_without() -> None:
    preflight(Facts(judged({}, reward=may_ask, group_reward=may_ask_of_all)))


def test_judges_that_nobody_asks_are_refused() -> None:
    check_sentence(
        refusal(judged(AT_URL, reward=asks_nobody)),
        "environment.judges: no function uses judges",
        "give environment.reward or environment.group_reward a parameter `judges`",
    )


def test_a_function_that_asks_judges_is_refused_without_any() -> None:
    check_sentence(
        refusal(judged({}, reward=asks)),
        f"environment.judges: {__name__}:asks ({place_of(asks)}) has a parameter `judges`, but no judges "
        f"are configured",
    )


def test_a_judge_to_serve_needs_vllm(monkeypatch: pytest.MonkeyPatch, small_policy: str) -> None:
    monkeypatch.setenv("SF_VLLM_PYTHON", "/nowhere/python")
    served = {"quality": {"model": small_policy}}
    sentence = refusal(judged(served, reward=asks))
    check_sentence(
        sentence,
        "vllm and environment.judges.NAME.model need",
        "/nowhere/python does not exist",
        "`make vllm`",
    )
    # workers elsewhere have their own
    elsewhere = judged(served, reward=asks).model_dump() | {"cluster": {"scheduler": "tcp://127.0.0.1:1"}}
    preflight(Facts(RunConfig.model_validate(elsewhere)))


def name_vllm(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str) -> None:
    """Make an environment in `folder` that seems to have this version of vLLM, and name its Python: what is
    checked before a run starts needs no more, so these tests pass where vLLM is not installed."""
    python = folder / "bin" / "python"
    (folder / "lib" / "python3.11" / "site-packages" / f"vllm-{version}.dist-info").mkdir(parents=True)
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setenv("SF_VLLM_PYTHON", str(python))


def test_a_judge_on_the_cpu_needs_the_cpu_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_policy: str
) -> None:
    name_vllm(monkeypatch, tmp_path, "0.32.0")
    workers: dict[str, Any] = RunConfig().model_dump()["cluster"]["workers"]

    def on(device: str | None) -> RunConfig:
        config = judged({"quality": {"model": small_policy}}, reward=asks).model_dump()
        config["cluster"]["workers"] = workers | {"s0": {"tags": ["reward"], "device": device}}
        return RunConfig.model_validate(config)

    check_sentence(refusal(on("cpu")), "has vLLM for GPUs (vllm-0.32.0)", "cluster.workers.NAME.device")
    preflight(Facts(on("cuda:0")))


def test_a_judge_that_is_not_there_or_has_no_template_is_refused(tmp_path: Path, small_policy: str) -> None:
    def told(model: Path) -> str:
        return refusal(judged({"quality": {"model": str(model)}}, reward=asks))

    named = f"environment.judges.quality.model: {tmp_path / 'judge'} "
    check_sentence(told(tmp_path / "judge"), f"{named}is not a Hugging Face folder")
    shutil.copytree(small_policy, tmp_path / "judge")
    (tmp_path / "judge" / "chat_template.jinja").unlink()
    check_sentence(told(tmp_path / "judge"), f"{named}has no chat template")


def test_the_plan_says_where_judges_are_and_what_they_may_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_policy: str
) -> None:
    name_vllm(monkeypatch, tmp_path, "0.32.0+cpu")
    file = tmp_path / "run.yaml"
    judges = f"""
environment:
  reward: {__name__}:asks
  judges:
    quality: {{url: "http://127.0.0.1:1/v1", max_tokens_per_iteration: 5000}}
    manners: {{model: {small_policy}, concurrency: 4}}
cluster:
  workers:
    t0: {{tags: [rollout, train]}}
    a0: {{tags: [agent]}}
    s0: {{tags: [reward]}}
    c0: {{tags: [cpu]}}
"""
    file.write_text(judges, encoding="utf-8")
    code, said = sf("plan", str(file))
    assert code == 0, said
    assert "scores the answers of agents, and serves the judges manners" in said
    assert (
        "judge quality the model at http://127.0.0.1:1/v1, asked by s0; 16 calls at once per worker, " in said
    )
    assert "at most 5,000 tokens per iteration" in said
    assert f"judge manners {small_policy}, 0 million parameters, served by vLLM on s0; 4 calls" in said
    file.write_text(judges.replace("s0: {tags: [reward]}", "s0: {tags: [cpu]}"), encoding="utf-8")
    code, said = sf("plan", str(file))
    assert code == 2 and "environment.judges.manners.model needs a worker tagged reward" in said
