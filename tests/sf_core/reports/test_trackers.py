import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from sf_core.config import RunConfig
from sf_core.config.validation import ConfigError
from sf_core.reports.export.trackers import MlflowRun, Trackers
from storage import files
from storage.run_directory import RunDirectory
from storage.tables.metrics import write_metrics


def config_of(**track: str) -> RunConfig:
    return RunConfig.model_validate({"run_id": "run-1", "track": track, "train": {"iterations": 2}})


@pytest.fixture
def mlflow_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture
def wandb_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return tmp_path / "wandb"


def measure(run: RunDirectory, number: int) -> None:
    write_metrics(run, "train", number, [{"loss": 3.0 - number}, {"loss": 2.5 - number, "kl": float("nan")}])
    write_metrics(run, "devices", number, [{"idle_r0": 0.25}])


def test_mlflow_gets_every_metric_once_though_the_run_was_interrupted(
    empty_run: RunDirectory, mlflow_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

    config = config_of(mlflow="agents")
    write_metrics(empty_run, "evaluation", 0, [{"reward_mean": 0.5}])
    measure(empty_run, 0)
    client = MlflowClient(mlflow_at)

    def the_run() -> Run:
        [experiment] = [e for e in client.search_experiments() if e.name == "agents"]
        [sent] = client.search_runs([experiment.experiment_id])
        return sent

    with monkeypatch.context() as patch, pytest.raises(ValueError), Trackers(empty_run, config) as trackers:
        patch.setattr(
            "sf_core.reports.export.trackers.flatten", lambda _: [("n" * 300, "a name that MLflow refuses")]
        )
        trackers.send(0)
        raise ValueError
    assert (the_run().info.status, the_run().data.metrics) == ("FAILED", {})
    with pytest.raises(KeyboardInterrupt), Trackers(empty_run, config) as trackers:
        trackers.send(0)
        raise KeyboardInterrupt
    assert the_run().info.status == "KILLED"
    measure(empty_run, 1)
    write_metrics(empty_run, "evaluation", 2, [{"reward_mean": 0.75}])
    with Trackers(empty_run, config) as trackers:
        trackers.send(1)
    sent = the_run()

    def curve(name: str) -> list[tuple[int, float]]:
        return sorted((m.step, m.value) for m in client.get_metric_history(sent.info.run_id, name))

    assert curve("train/loss") == [(0, 3.0), (1, 2.5), (2, 2.0), (3, 1.5)]
    assert curve("devices/idle_r0") == [(0, 0.25), (1, 0.25)]
    assert curve("evaluation/reward_mean") == [(0, 0.5), (2, 0.75)]
    assert sent.info.run_name == "run-1" and sent.info.status == "FINISHED"
    assert sent.data.params["train.iterations"] == "2"
    MlflowRun(config, sent.info.run_id)
    assert the_run().info.status == "RUNNING"


def test_wandb_offline_keeps_the_metrics_in_a_file(empty_run: RunDirectory, wandb_at: Path) -> None:
    import wandb

    measure(empty_run, 0)
    with Trackers(empty_run, config_of(wandb="agents")):
        pass
    wandb.teardown()  # as at the end of a process: its service writes what it still has
    [file] = wandb_at.glob("offline-run-*-run-1-*/*.wandb")
    data = file.read_bytes()
    assert b"train/loss" in data and b"devices/idle_r0" in data


def test_wandb_goes_on_with_the_run_that_the_run_directory_names_and_begins_another_for_another(
    empty_run: RunDirectory, wandb_at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    begun: list[tuple[str, str | None]] = []
    init = wandb.init

    def noted(**options: Any) -> Any:
        begun.append((options["id"], options["name"]))
        return init(**options)

    monkeypatch.setattr(wandb, "init", noted)
    for number in range(2):
        measure(empty_run, number)
        with Trackers(empty_run, config_of(wandb="agents")):
            pass
    files.remove_folder(empty_run.uri)
    measure(empty_run, 0)
    with Trackers(empty_run, config_of(wandb="agents")):
        pass
    wandb.teardown()
    ids, names = zip(*begun, strict=True)
    assert ids[0] == ids[1] != ids[2]
    assert names == ("run-1", None, "run-1")


def test_a_tracker_that_is_away_costs_a_line_of_the_log_and_gets_it_later(
    empty_run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measure(empty_run, 0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/missing/folder/mlflow.db")
    (tmp_path / "missing").write_text("a file where the folder should be", encoding="utf-8")
    with caplog.at_level(logging.WARNING), Trackers(empty_run, config_of(mlflow="agents")):
        pass
    assert [r.message.partition(" its metrics")[0] for r in caplog.records if "run-1" in r.message] == [
        "run run-1: mlflow did not accept"
    ]


def test_no_tracker_is_imported_where_none_is_asked_for(empty_run: RunDirectory) -> None:
    measure(empty_run, 0)
    before = set(sys.modules)
    with Trackers(empty_run, config_of()) as trackers:
        trackers.send(0)
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] in ("mlflow", "wandb")}


def test_a_package_that_is_missing_is_named(empty_run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"track\.wandb is set, but wandb is not installed; it comes with"):
        Trackers(empty_run, config_of(wandb="agents"))
