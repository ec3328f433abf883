from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sf_core.reports.html import blocks
from sf_core.reports.view import RunView, SessionSet
from storage.run_directory import RunDirectory
from tests.bench.runs import configure
from tests.sf_core.reports.html.report_runs import commit_iteration
from tests.sf_core.reports.test_tables import trajectory


def test_once_blocks_do_not_fit_older_iterations_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rng, length = RunDirectory(str(tmp_path / "run-1")), np.random.default_rng(0), 500
    configure(run)
    for number in range(12):
        ids = rng.integers(0, 256, length, np.int32)
        row = trajectory(f"run-1.g{number}.0.a1", [number] * length, token_ids=ids, turns=[])
        commit_iteration(run, number, [row])
    everything = list(RunView(run).iter_session_sets())
    size = blocks.embed_sessions(everything[-1:], 10**6).num_characters
    read = []

    def noted(sampling: SessionSet, columns: list[str]) -> pa.Table:
        if "token_ids" in columns:
            read.append(sampling.number)
        return original(sampling, columns)

    original = SessionSet.read
    monkeypatch.setattr(SessionSet, "read", noted)
    embedded = blocks.embed_sessions(everything, int(2.5 * size))
    assert [facts.number for facts in embedded.facts] == [11, 10]
    assert read == [11, 10, 9, 8, 7]
    assert embedded.num_all == 12
