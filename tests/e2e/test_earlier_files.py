"""A run of db999c56, whose `reward_parts` are maps, goes on. tests/data/runs/before-lists.tar.xz is such
a run of two iterations, without what a resume makes again: checkpoints, version 1, logs and pictures."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped]
import pyarrow.parquet as pq
import pytest

from seamlessflow import open_run
from storage import files
from storage.run_directory import RunDirectory
from tests.bench.ages import age
from tests.e2e.conftest import Cluster
from tests.e2e.quickstart import options, read, sf
from tests.storage.golden import DATA

RUN = DATA / "runs" / "before-lists.tar.xz"

ROUNDS_ALIKE = "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
"""Whether this CPU is of the maker of the one that trained the run. On others the sums of a step are rounded
differently: its weights differed by 6e-6 on an AMD EPYC, by the code of db999c56 too."""


MADE_IN = Path("/tmp/readers/old/runs")
"""Folder in which the run was made. Its journal names files there, so a resume of a copy needs it."""


def unpack(folder: Path) -> RunDirectory:
    with tarfile.open(RUN) as packed:
        packed.extractall(folder, filter="data")
    return RunDirectory(str(folder / "before-lists"))


@pytest.fixture
def earlier(tmp_path: Path) -> RunDirectory:
    return unpack(tmp_path / "runs")


@pytest.fixture
def original() -> Iterator[None]:
    shutil.rmtree(MADE_IN, ignore_errors=True)
    unpack(MADE_IN)
    yield
    shutil.rmtree(MADE_IN)


def versions(run: RunDirectory, kind: str) -> dict[int, list[str]]:
    """Schema versions of the files of a table, by iteration."""
    return {
        number: [pq.read_schema(uri).metadata[b"seamlessflow.schema"].decode() for uri in uris]
        for number, uris in run.list_partitions(kind).items()
    }


def test_a_finished_run_with_maps_is_replayed_exported_inspected_and_reported(
    earlier: RunDirectory, tmp_path: Path
) -> None:
    uri = earlier.uri
    done = sf(tmp_path, "replay", uri, "--iteration", "1")
    if ROUNDS_ALIKE:
        assert done.stdout == "iteration 1: the weights are equal, bit for bit\n", done.stdout + done.stderr
    else:
        [difference] = re.findall(r"the weights differ, by at most (\S+)\n", done.stdout)
        assert float(difference) < 1e-4
    for kind, out in (("trl", "t.jsonl"), ("verl", "v.parquet"), ("sharegpt", "s.jsonl"), ("atif", "a")):
        assert "32 conversations" in read("export", uri, "--to", kind, str(tmp_path / out))
    assert len(json.loads(read("inspect", uri, "--json"))["iterations"]) == 2
    sessions = open_run(uri).sessions()
    assert [part["name"] for part in sessions["reward_parts"][0].as_py()] == ["answer"]
    assert "answer 0" in read("inspect", uri, "--session", sessions["session_id"][-1].as_py())
    read("report", uri, "-o", str(tmp_path / "report.html"))
    assert (tmp_path / "report.html").stat().st_size > 2**16


# the same files are replayed and read above
@pytest.mark.nightly
def test_a_stopped_run_with_maps_goes_on_with_lists(
    cluster: Cluster, earlier: RunDirectory, original: None, tmp_path: Path
) -> None:
    """It was killed before the filter of iteration 1, and while it wrote into a folder that readers open."""
    trained = earlier.read_committed(1, "train")
    for stage in ("filter", "train", "publish"):
        files.remove(earlier.manifest_file(1, stage))
    files.remove(earlier.manifest_file(2, "evaluate"))
    for folder in (
        earlier.partition("batches", 1),
        earlier.weights_dir(2),
        earlier.partition("evaluations", 2),
    ):
        files.remove_folder(folder)
    left = Path(earlier.partition("trajectories", 1), f".rollout-1.parquet.{'0' * 32}.tmp")
    left.write_bytes(b"PAR1")
    age(earlier.uri)
    stored = json.loads(files.read_bytes(earlier.path("config.json")))
    stored["train"]["iterations"] = 3
    files.write_atomic(earlier.path("config.json"), json.dumps(stored).encode())
    before = {uri: files.describe(uri) for uri in earlier.list_partitions("trajectories")[1]}

    done = sf(tmp_path, "resume", earlier.uri, on=cluster.services)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not left.exists() and {uri: files.describe(uri) for uri in before} == before
    # the rows are the same, so the weights are, bit for bit
    if ROUNDS_ALIKE:
        assert earlier.read_committed(1, "train").files("weights") == trained.files("weights")

    # a mixed folder is read
    assert versions(earlier, "trajectories") == {0: ["4"], 1: ["4"], 2: ["5"]}
    assert versions(earlier, "batches") == {0: ["4"], 1: ["5"], 2: ["5"]}
    assert versions(earlier, "evaluations") == {0: ["4"], 3: ["5"]}
    assert len(open_run(earlier.uri).sessions()) == 3 * 16 + 2 * 4
    assert "bit for bit" in read("replay", earlier.uri, "--iteration", "2")
    assert "48 conversations" in read("export", earlier.uri, "--to", "trl", str(tmp_path / "out.jsonl"))
    read("report", earlier.uri, "-o", str(tmp_path / "report.html"))
    asked = ("--version", "3", *options(evaluate__num_tasks=3))
    done = sf(tmp_path, "evaluate", earlier.uri, *asked, on=cluster.services)
    assert done.returncode == 0 and "3 tasks of" in done.stdout, done.stdout + done.stderr

    read("export", earlier.uri, "--to", "parquet", str(tmp_path / "tables"))
    rows = pd.read_parquet(tmp_path / "tables" / "trajectories")
    assert {part["name"] for parts in rows["reward_parts"] for part in parts} == {"answer"}
