import base64
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from sf_core.reports.html import blocks
from sf_core.reports.sessions import SessionSet
from sf_core.reports.view import RunView
from storage.media import store_image
from storage.run_directory import RunDirectory
from tests.bench.reports.report_runs import commit_iteration
from tests.bench.reports.tables import trajectory
from tests.bench.runs import configure


def test_once_blocks_do_not_fit_older_iterations_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(str(tmp_path / "run-1"))
    rng = np.random.default_rng(0)
    length = 500
    configure(run)
    for number in range(12):
        ids = rng.integers(0, 256, length, np.int32)
        row = trajectory(f"run-1.g{number}.0.a1", [number] * length, token_ids=ids, turns=[])
        commit_iteration(run, number, [row])
    everything = list(RunView(run).iter_session_sets())
    size = blocks.embed_sessions(everything[-1:], run.media_dir, 10**6).num_characters
    read = []

    def noted(sampling: SessionSet, columns: list[str]) -> pa.Table:
        if "token_ids" in columns:
            read.append(sampling.number)
        return original(sampling, columns)

    original = SessionSet.read
    monkeypatch.setattr(SessionSet, "read", noted)
    embedded = blocks.embed_sessions(everything, run.media_dir, int(2.5 * size))
    assert [facts.number for facts in embedded.facts] == [11, 10]
    assert read == [11, 10, 9, 8, 7]
    assert embedded.num_all == 12


def test_images_are_embedded_small_and_a_missing_one_is_left_out(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (1280, 720), "red").save(file, "PNG")
    sha256 = store_image(str(tmp_path), file.getvalue())
    small = blocks.make_thumbnail(str(tmp_path), sha256)
    assert small is not None
    data = base64.b64decode(small.removeprefix("data:image/webp;base64,"))
    assert Image.open(io.BytesIO(data)).size == (blocks.THUMBNAIL, 90) and len(data) < 1000
    assert blocks.make_thumbnail(str(tmp_path), "0" * 64) is None
