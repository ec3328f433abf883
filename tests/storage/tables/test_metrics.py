from pathlib import Path

import pandas as pd  # type: ignore[import-untyped]

from storage.run_directory import RunDirectory
from storage.tables.metrics import read_metrics, write_metrics


def test_steps_are_read_back_with_their_place(run_anywhere: RunDirectory) -> None:
    ref = write_metrics(run_anywhere, "train", 3, [{"loss": 0.5, "lag_mean": 1}, {"loss": 0.25}])
    assert ref.uri == "metrics/train/iteration=3.parquet"
    assert read_metrics(run_anywhere.path(ref.uri)) == [
        {"iteration": 3, "step": 0, "loss": 0.5, "lag_mean": 1.0},
        {"iteration": 3, "step": 1, "loss": 0.25, "lag_mean": None},
    ]


def test_the_folder_reads_as_one_table(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-1"))
    for iteration in (0, 1):
        write_metrics(run, "train", iteration, [{"loss": 1.0 - iteration}])
    frame = pd.read_parquet(run.path("metrics", "train")).sort_values("iteration")
    assert frame["iteration"].tolist() == [0, 1]
    assert frame["loss"].tolist() == [1.0, 0.0]
