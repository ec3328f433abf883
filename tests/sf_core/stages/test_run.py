import os
import socket
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sf_core.config import DataplaneConfig, RunConfig, StorageConfig
from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.control.client import DataplaneClient
from sf_core.stages.evaluate import evaluate
from sf_core.stages.finish import finish
from sf_core.stages.run import OpenRun, RunRef, begin_attempt
from sf_core.types import Task
from storage import files
from storage.run_directory import STAGES, Attempt, RunDirectory
from tests import bench
from tests.bench import runs
from tests.bench.dataplane import planes


def configured(folder: Path, url: str | None = "http://127.0.0.1:8700") -> RunConfig:
    return RunConfig(
        run_id="r", seed=7, dataplane=DataplaneConfig(url=url), storage=StorageConfig(root=str(folder))
    )


def test_the_data_plane_of_the_environment_is_the_attempts_and_not_the_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SF_DATAPLANE_URL", "http://127.0.0.1:8701")
    run = begin_attempt(configured(tmp_path, url=None))
    assert run.dataplane_url == "http://127.0.0.1:8701"
    directory = RunDirectory(run.uri)
    assert directory.read_config(RunConfig).dataplane.url is None
    assert directory.newest_attempt() == Attempt(dataplane="http://127.0.0.1:8701", host=socket.gethostname())


def test_a_password_in_the_address_is_used_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SF_DATAPLANE_URL", "https://me:secret@planes.example:8700/a")
    run = begin_attempt(configured(tmp_path, url=None))
    assert run.dataplane_url == "https://me:secret@planes.example:8700/a"
    assert RunDirectory(run.uri).newest_attempt().dataplane == "https://planes.example:8700/a"


def test_an_attempt_that_only_evaluates_leaves_the_configuration(tmp_path: Path) -> None:
    config = configured(tmp_path)
    begin_attempt(config)
    run = begin_attempt(config.model_copy(update={"seed": 8}), evaluate_only=True)
    directory = RunDirectory(run.uri)
    assert (run.attempt, directory.newest_attempt().evaluate_only) == (2, True)
    assert directory.read_config(RunConfig) == config


def test_an_attempt_removes_what_killed_writers_left_and_nothing_that_is_written(tmp_path: Path) -> None:
    directory = RunDirectory(begin_attempt(configured(tmp_path)).uri)
    name = f".rollout-1.parquet.{'0' * 32}.tmp"
    left = [Path(directory.partition("trajectories", 2), name), Path(directory.path(name))]
    for file in left:
        files.write_atomic(str(file), b"half")
    with files.writer(directory.partition("opened", 0) + "/x.parquet") as written:
        written.write(b"whole")
        written.flush()
        bench.ages.age(directory.uri)
        begin_attempt(configured(tmp_path))
    assert not any(file.exists() for file in left)
    assert files.read_bytes(directory.partition("opened", 0) + "/x.parquet") == b"whole"


def test_no_attempt_begins_at_another_data_plane_than_the_one_that_has_the_run_open(
    tmp_path: Path, model_dir: str
) -> None:
    with (
        planes.running_app() as url,
        planes.running_app() as other_url,
        planes.attended(url, tmp_path, model_dir) as plane,
    ):
        plane.register(attempt=1)
        config = configured(tmp_path).model_copy(update={"run_id": "run"})
        elsewhere = config.model_copy(update={"dataplane": DataplaneConfig(url=other_url)})
        with bench.refusals.clear_refusal(
            "run run", f"process {os.getpid()} on ", "dataplane.url", "attempt 1"
        ):
            begin_attempt(elsewhere)
        assert not RunDirectory(config.run_dir).exists()
        assert begin_attempt(config.model_copy(update={"dataplane": DataplaneConfig(url=url)})).attempt == 1
        plane.post("/runs/run/release")
        assert begin_attempt(elsewhere).attempt == 2


def test_an_attempt_at_another_run_leaves_nothing_of_one_without_a_batch(tmp_path: Path) -> None:
    config = configured(tmp_path)
    run = RunDirectory(begin_attempt(config).uri)
    runs.commit(run, None, "start", data={"origin": "first"})
    runs.commit(run, 0, "evaluate")
    kept = [run.path("logs", "flow.log"), run.path("opened", "iteration=0", "a.parquet")]
    for uri in (*kept, run.path("start", "a"), run.path("evaluations", "a"), run.metrics_file("devices", 0)):
        files.write_atomic(uri, b"a")
    same = begin_attempt(config)
    assert OpenRun(same).origin == "first" and not OpenRun(same).evaluation_due(0)
    ref = begin_attempt(config.model_copy(update={"seed": 8}))
    assert (OpenRun(ref).origin, OpenRun(ref).config.seed, ref.attempt) == ("", 8, 3)
    assert OpenRun(ref).evaluation_due(0) and run.read_manifest(None, "start") is None
    left = sorted(path.name for path in Path(run.uri).iterdir())
    assert left == ["attempts", "config.json", "logs", "opened"]
    # an attempt that had looked before this batch was there
    runs.commit(run, 0, "rollout", attempt=ref.attempt)
    with pytest.raises(ValueError, match="r was started with seed 8, not 9; choose another run_id"):
        begin_attempt(config.model_copy(update={"seed": 9}))
    assert run.read_config(RunConfig).seed == 8


def test_deadlines_of_workers_grow_with_the_time_that_copying_the_policy_took(tmp_path: Path) -> None:
    small = configured(tmp_path / "small")
    config = configured(tmp_path / "large")
    run = begin_attempt(small)
    runs.commit(RunDirectory(run.uri), None, "start", data={"copied_s": 1.9})
    assert OpenRun(run).config == small, "what is so small takes no time"
    run = begin_attempt(config)
    assert OpenRun(run).config == config
    runs.commit(RunDirectory(run.uri), None, "start", data={"copied_s": 10.0})
    opened = OpenRun(run).config
    grown = {
        "yield": opened.cluster.yield_timeout_s - config.cluster.yield_timeout_s,
        "gang": opened.train.gang_timeout_s - config.train.gang_timeout_s,
        "stage": opened.cluster.stage_timeout_s - config.cluster.stage_timeout_s,
    }
    # twice the time for a checkpoint, which is six times as large as a start folder in two bytes
    assert grown == {"yield": 120.0, "gang": 120.0, "stage": 120.0}
    assert RunDirectory(run.uri).read_config(RunConfig) == config


def test_an_attempt_does_not_count_as_its_own_what_a_later_one_commits(tmp_path: Path) -> None:
    config = configured(tmp_path)
    older = begin_attempt(config)
    newer = begin_attempt(config)
    for stage in STAGES:
        runs.commit(RunDirectory(newer.uri), 0, stage, attempt=newer.attempt)
    refusal = "r: attempt 1 was superseded by a later attempt and must not "
    with pytest.raises(ValueError, match=f"{refusal}continue with iteration 0"):
        OpenRun(older).list_pending_stages(0)
    with pytest.raises(ValueError, match=f"{refusal}end the run"):
        finish(older)
    assert OpenRun(newer).list_pending_stages(0) == []


def test_stages_are_pending_in_order_from_the_first_that_is_not_committed(tmp_path: Path) -> None:
    ref = begin_attempt(configured(tmp_path))
    run = OpenRun(ref)
    seen = []
    for _ in range(2 * len(STAGES)):
        iteration = run.iterations_left().start
        stage = run.list_pending_stages(iteration)[0]
        seen.append((iteration, stage))
        runs.commit(run.directory, iteration, stage)
    assert seen == [(iteration, stage) for iteration in (0, 1) for stage in STAGES]


def test_another_attempt_says_with_which_iteration_it_continues(tmp_path: Path) -> None:
    config = configured(tmp_path)
    first = OpenRun(begin_attempt(config))
    assert first.describe_resumption() == ""
    for stage in STAGES:
        runs.commit(first.directory, 0, stage)
    second = OpenRun(begin_attempt(config))
    assert second.describe_resumption() == "attempt 2 continues with iteration 1, 2 of 40"
    runs.commit(second.directory, 1, "rollout", attempt=2)
    told = "attempt 2 continues with iteration 1, 2 of 40, whose rollout is committed"
    assert second.describe_resumption() == told
    runs.commit(second.directory, 1, "filter", attempt=2)
    told = "attempt 2 continues with iteration 1, 2 of 40, whose rollout and filter are committed"
    assert second.describe_resumption() == told
    for number, stage in product(range(1, 40), STAGES):
        runs.commit(second.directory, number, stage, attempt=2)
    told = "attempt 2 continues after the last iteration, with the evaluation"
    assert second.describe_resumption() == told


def test_a_run_goes_on_from_its_first_gap(tmp_path: Path) -> None:
    run = OpenRun(begin_attempt(configured(tmp_path)))
    for iteration, stage in [(0, "rollout"), (0, "train"), (1, "rollout")]:
        runs.commit(run.directory, iteration, stage)
    assert run.iterations_left() == range(run.config.train.iterations)
    assert run.list_pending_stages(0) == ["filter", "publish"]


def test_held_out_tasks_are_given_out_once_when_their_version_is_due(
    tmp_path: Path,
    model_dir: str,
) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    runs.configure(directory, train={"iterations": 5}, evaluate={"every": 2, "num_tasks": 3})
    runs.commit(directory, 2, "evaluate")
    with planes.running_app() as url, planes.attended(url, tmp_path, model_dir) as plane:
        run = OpenRun(RunRef("run", directory.uri, url, attempt=1))
        plane.register()
        for version in (0, 0, 1, 2, 3, 5):
            run.begin_evaluation(version)
        given_out = run.dataplane.status()["evaluations"]
    # the last version is due whatever its number
    assert given_out == {"0": {"finished": 0, "num_tasks": 3}, "5": {"finished": 0, "num_tasks": 3}}


def judging(task: Task, answer: str, judges: Any = None) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("judges", "told"),
    [
        ({}, {}),
        ({"a": {"url": "http://127.0.0.1:1/v1"}}, {}),
        (
            {"a": {"url": "http://127.0.0.1:1/v1", "max_tokens_per_iteration": 900}, "b": {"model": "/b"}},
            {"judge_budgets": {"a": 900}, "scored_apart": True},
        ),
    ],
)
def test_the_data_plane_is_told_what_judges_may_take_and_who_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judges: dict[str, Any], told: dict[str, Any]
) -> None:
    environment = {"reward": f"{__name__}:judging", "judges": judges}
    directory = RunDirectory(str(tmp_path / "run"))
    runs.configure(directory, environment=environment)
    said: dict[str, Any] = {}
    monkeypatch.setattr(DataplaneClient, "register", lambda client, **spec: said.update(spec))
    OpenRun(RunRef("run", directory.uri, "http://127.0.0.1:1", attempt=1)).register()
    assert {name: said[name] for name in ("judge_budgets", "scored_apart") if said[name]} == told
    assert RunSpec.model_validate(said).scored_apart == bool(told)


def test_no_version_is_measured_but_the_one_that_engines_serve(
    tmp_path: Path,
    model_dir: str,
) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    runs.configure(directory)
    for iteration, stage in product(range(3), STAGES):
        runs.commit(directory, iteration, stage, data={"groups": [], "rejected": {}})
    with planes.running_app() as url, planes.attended(url, tmp_path, model_dir) as plane:
        ref = RunRef("run", directory.uri, url, attempt=1)
        plane.register()
        for version in (0, 2, 4):
            refusal = f"^run: version {version} cannot be measured: engines serve version 3$"
            with pytest.raises(ValueError, match=refusal):
                evaluate(ref, version)
        OpenRun(ref).refuse_unserved(3)


def test_a_run_that_was_removed_and_begun_again_has_its_new_configuration(tmp_path: Path) -> None:
    config = configured(tmp_path)
    old = begin_attempt(config)
    assert OpenRun(old).config.seed == 7
    files.remove_folder(old.uri)
    new = begin_attempt(config.model_copy(update={"seed": 8}))
    assert (new.uri, new.attempt) == (old.uri, old.attempt)
    assert OpenRun(new).config.seed == 8


def test_without_a_data_plane_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SF_DATAPLANE_URL", raising=False)
    with pytest.raises(ValueError, match=r"no data plane: set dataplane\.url or SF_DATAPLANE_URL"):
        begin_attempt(configured(tmp_path, url=None))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("given", "data", "expected"),
    [
        (None, {"derived": {"train.learning_rate": 2.6e-6}}, 2.6e-6),
        (1e-3, {"derived": {"train.learning_rate": 2.6e-6}}, 1e-3),
        # nothing was left open
        (3e-4, {}, 3e-4),
    ],
)
def test_the_learning_rate_is_the_one_derived_at_the_start_unless_it_is_named(
    tmp_path: Path, given: float | None, data: dict[str, Any], expected: float
) -> None:
    config = configured(tmp_path)
    config = config.model_copy(update={"train": config.train.model_copy(update={"learning_rate": given})})
    run = begin_attempt(config)
    runs.commit(RunDirectory(run.uri), None, "start", data=data)
    assert OpenRun(run).config.train.rate == expected
