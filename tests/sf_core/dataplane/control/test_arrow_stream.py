"""A batch as an Arrow stream over real HTTP, and the code of docs/guides/training/your-trainer.md."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from sf_core.dataplane.control import arrow_stream as stream_module
from sf_core.dataplane.control.arrow_stream import MEDIA_TYPE, arrow_stream
from storage.media import ImageSpan
from storage.run_directory import RunDirectory
from storage.tables.outcomes import write_outcomes
from storage.tables.parquet import METADATA
from storage.tables.schema import MULTIMODAL_SCHEMA, SCHEMA
from storage.tables.trajectories import images_of, read_trajectories, to_rows, write_trajectories
from tests.bench import runs
from tests.bench.dataplane.planes import ServedPlane
from tests.bench.waits import join

PAGE = (Path(__file__).parents[4] / "docs" / "guides" / "training" / "your-trainer.md").read_text(
    encoding="utf-8"
)
PATH = "/runs/run/batches/{}/stream"


def fill_batch(plane: ServedPlane) -> None:
    for i, claim in enumerate(plane.claim(4)):
        session = f"/sessions/{claim['session_id']}"
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        plane.post(f"{session}/v1/chat/completions", body, claim["key"])
        plane.post(f"{session}/finish", {"status": "finished", "reward": float(i)})


def read(response: httpx.Response) -> pa.Table:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    return pa.ipc.open_stream(response.content).read_all()


def sealed_file(plane: ServedPlane, batch: int = 0) -> str:
    sealed = plane.post(f"/runs/run/batches/{batch}/seal", {"attempt": 1})
    return f"{plane.run_dir}/run/{sealed['files'][0]['uri']}"


def test_the_stream_is_the_sealed_batch_in_the_documented_columns(answering_plane: ServedPlane) -> None:
    fill_batch(answering_plane)
    streamed = read(answering_plane.http.get(PATH.format(0)))
    assert streamed.schema.equals(SCHEMA.with_metadata(METADATA), check_metadata=True)
    stored = read_trajectories(sealed_file(answering_plane))
    assert streamed.cast(SCHEMA).to_pylist() == stored.drop_columns("iteration").to_pylist()


def test_reading_again_gives_the_same_batch(answering_plane: ServedPlane) -> None:
    fill_batch(answering_plane)
    assert (
        answering_plane.http.get(PATH.format(0)).content == answering_plane.http.get(PATH.format(0)).content
    )


def test_a_batch_that_is_not_ready_is_waited_for(answering_plane: ServedPlane) -> None:
    early = answering_plane.http.get(PATH.format(0))
    assert early.status_code == 409
    assert "2 of 2 groups" in early.json()["error"]["message"]
    found: list[pa.Table] = []
    waiting = threading.Thread(
        target=lambda: found.append(read(answering_plane.http.get(PATH.format(0), params={"wait_s": 20})))
    )
    waiting.start()
    fill_batch(answering_plane)
    join(waiting)
    assert found[0].num_rows == 4


def test_a_committed_batch_is_read_from_the_run_directory(answering_plane: ServedPlane) -> None:
    fill_batch(answering_plane)
    directory = RunDirectory(f"{answering_plane.run_dir}/run")
    rows = to_rows(read_trajectories(sealed_file(answering_plane)))[:1]
    ref = write_trajectories(directory, 7, rows, "other")
    outputs = [write_outcomes(directory, 7, [], "other"), ref]
    runs.commit(directory, 7, "rollout", outputs=outputs)
    assert read(answering_plane.http.get(PATH.format(7))).num_rows == 1


def test_an_unknown_run_is_refused_with_a_sentence(answering_plane: ServedPlane) -> None:
    response = answering_plane.http.get("/runs/other/batches/0/stream")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "run_not_found")


def test_the_stream_of_a_multimodal_policy_has_its_images(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    span = ImageSpan("a" * 64, 0, 1, 28, 28)
    rows = [runs.conversation([{"role": "user", "content": "x"}], images=images) for images in ((span,), ())]
    file = run.path(write_trajectories(run, 0, rows, "part", is_multimodal=True).uri)
    streamed = pa.ipc.open_stream(b"".join(arrow_stream([file], is_multimodal=True))).read_all()
    assert streamed.schema.equals(MULTIMODAL_SCHEMA) and images_of(streamed) == [(span,), ()]


def test_rows_leave_in_pieces_and_a_stream_that_breaks_off_is_noticed(
    answering_plane: ServedPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_batch(answering_plane)
    monkeypatch.setattr(stream_module, "MAX_ROWS", 1)
    file = sealed_file(answering_plane)
    pieces = list(arrow_stream([file]))
    assert len(pieces) == 4 + 1
    assert pa.ipc.open_stream(b"".join(pieces)).read_all().num_rows == 4
    broken = arrow_stream([file, f"{file}.missing"])
    begun = [next(broken) for _ in range(4)]
    with pytest.raises(ValueError, match="no such file"):
        next(broken)
    # no end mark: the reader sees that rows may be missing where the transport does not say so
    assert not b"".join(begun).endswith(b"\xff\xff\xff\xff\x00\x00\x00\x00")


def test_the_trainer_of_the_page_makes_a_loss_ready_batch(answering_plane: ServedPlane) -> None:
    fill_batch(answering_plane)
    page: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(snippet, "docs/guides/training/your-trainer.md", "exec"), page)
    url = answering_plane.url + PATH.format(0) + "?wait_s=5"
    batch = page["loss_ready"](page["read_batch"](url, answering_plane.key))
    rows = to_rows(read_trajectories(sealed_file(answering_plane)))
    for i, row in enumerate(rows):
        length = len(row.token_ids)
        assert batch["ids"][i, :length].tolist() == row.token_ids.tolist()
        assert batch["mask"][i].sum() == row.loss_mask.sum()
        assert np.array_equal(batch["behaviour_logprobs"][i, :length], np.nan_to_num(row.logprobs))
        assert set(batch["advantages"][i][batch["mask"][i] == 1]) == {(-0.5, 0.5)[i % 2]}
    assert page["clipped_loss"](batch["behaviour_logprobs"], batch) == pytest.approx(
        -batch["advantages"].sum() / batch["mask"].sum()
    )
