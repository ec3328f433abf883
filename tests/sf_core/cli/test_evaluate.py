"""`sf evaluate` of versions apart from their run: what is measured when, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sf_core.cli.evaluate import evaluate_apart, is_plain
from sf_core.config import RunConfig
from sf_core.models.builtin import make_policy
from sf_core.stages.run import OpenRun, RunRef
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights, save_weights
from tests.bench import runs
from tests.bench.reports.evaluations import measure


@pytest.fixture
def run_with_weights(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(str(tmp_path / "runs" / "r"))
    config = runs.configure(run, train={"iterations": 2}, evaluate={"num_tasks": 2})
    runs.pretend(run, 2)
    make_policy(run.start_dir, config.policy, seed=0)
    save_weights(run.weights_dir(2), load_weights(run.start_dir), 2)
    return run


class Measures:
    """Stands in for a stack: the answers of a version are worth its number over ten."""

    def __init__(self) -> None:
        self.asked: list[RunConfig] = []

    def __call__(self, config: RunConfig) -> None:
        self.asked.append(config)
        directory = RunDirectory(config.run_dir)
        worth = int(directory.run_id[1:6]) / 10
        tasks = {f"t{i}": [worth] * config.evaluate.answers for i in range(config.evaluate.num_tasks)}
        measure(directory, tasks)


def test_each_version_is_measured_once(run_with_weights: RunDirectory) -> None:
    measures = Measures()
    found = evaluate_apart(run_with_weights.uri, None, 0, None, ["evaluate.num_tasks=3"], measures)
    assert [config.evaluate.num_tasks for config in measures.asked] == [3, 3]
    own = found.comparison
    assert own.before is not None
    assert (own.before.version, own.after.version, own.difference, own.won) == (0, 2, pytest.approx(0.2), 3)
    assert json.loads(found.as_json())["interval"] == [pytest.approx(0.2)] * 2
    again = evaluate_apart(run_with_weights.uri, 2, None, None, ["evaluate.num_tasks=3"], measures)
    assert len(measures.asked) == 2 and again.comparison.before is None
    assert Path(again.file).name != Path(found.file).name


def test_a_version_computes_in_the_dtype_that_the_run_began_with(run_with_weights: RunDirectory) -> None:
    policy = {"hidden_size": 32, "num_layers": 1, "warmstart": None, "dtype": "auto"}
    runs.configure(run_with_weights, train={"iterations": 2}, evaluate={"num_tasks": 2}, policy=policy)
    runs.commit(run_with_weights, None, "start", data={"derived": {"policy.dtype": "bfloat16"}})
    measures = Measures()
    evaluate_apart(run_with_weights.uri, 2, None, None, ["evaluate.num_tasks=3"], measures)
    [config] = measures.asked
    opened = OpenRun(RunRef(str(config.run_id), config.run_dir, "", 0))
    assert opened.config.policy.dtype == "bfloat16"


def test_prompts_are_asked_as_the_file_has_them_now(run_with_weights: RunDirectory, tmp_path: Path) -> None:
    file = tmp_path / "ask, me: {now}.jsonl"
    measures = Measures()
    for text in ("a", "b"):
        file.write_text(json.dumps({"prompt": text}) + "\n", encoding="utf-8")
        evaluate_apart(run_with_weights.uri, None, None, file, [], measures)
    assert [config.environment.name for config in measures.asked] == ["prompts"] * 2
    assert [config.evaluate.num_tasks for config in measures.asked] == [1, 1]
    assert measures.asked[0].environment.settings["file"] == str(file)


@pytest.mark.parametrize(
    ("version", "against", "prompts", "changes", "expected"),
    [
        (None, None, None, [], True),
        (None, None, None, ["evaluate.num_tasks=3", "dataplane.url=http://x"], True),
        (3, None, None, [], False),
        (None, 0, None, [], False),
        (None, None, Path("p"), [], False),
        (None, None, None, ["rollout.temperature=0"], False),
    ],
)
def test_the_newest_version_as_configured_is_measured_in_its_run(
    version: int | None, against: int | None, prompts: Path | None, changes: list[str], expected: bool
) -> None:
    assert is_plain(version, against, prompts, changes) is expected
