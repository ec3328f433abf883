"""A run of an earlier commit is read, replayed and continued. tests/data/runs/db999c56.tar.xz is a run of the
quickstart with a small policy at commit db999c56: three iterations, two evaluations, and its journal. It has
no key, pictures or logs. The `reward_parts` of its tables are maps."""

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
from storage.tensors.weights import load_weights
from tests.bench import stacks
from tests.bench.ages import age
from tests.bench.golden import DATA

RUN = DATA / "runs" / "db999c56.tar.xz"

MOST_ROUNDED = 1e-4
"""Bound on the difference of weights that another CPU trains: it rounds the sums of a step differently.
Weights of an Intel Xeon and an AMD EPYC differed by 6e-6."""

MADE_IN = Path("/tmp/seamlessflow-db999c56/runs")
"""Folder in which the run was made. Its journal names files there, so a resume of a copy needs it."""


def unpack(folder: Path) -> RunDirectory:
    with tarfile.open(RUN) as packed:
        packed.extractall(folder, filter="data")
    return RunDirectory(str(folder / "db999c56"))


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


def test_an_earlier_run_is_replayed_exported_inspected_and_reported(
    earlier: RunDirectory, tmp_path: Path
) -> None:
    uri = earlier.uri
    done = stacks.quickstart.sf(tmp_path, "replay", uri, "--iteration", "2")
    if "the weights are equal, bit for bit" not in done.stdout:
        [difference] = re.findall(r"the weights differ, by at most (\S+)\n", done.stdout)
        assert float(difference) < MOST_ROUNDED
    for kind, out in (("trl", "t.jsonl"), ("verl", "v.parquet"), ("sharegpt", "s.jsonl"), ("atif", "a")):
        assert "72 conversations" in stacks.quickstart.read("export", uri, "--to", kind, str(tmp_path / out))
    assert len(json.loads(stacks.quickstart.read("inspect", uri, "--json"))["iterations"]) == 3
    sessions = open_run(uri).sessions()
    assert [part["name"] for part in sessions["reward_parts"][0].as_py()] == ["answer"]
    assert "answer 0" in stacks.quickstart.read(
        "inspect", uri, "--session", sessions["session_id"][-1].as_py()
    )
    stacks.quickstart.read("report", uri, "-o", str(tmp_path / "report.html"))
    assert (tmp_path / "report.html").stat().st_size > 2**16


# the same files are replayed and read above
@pytest.mark.nightly
def test_an_earlier_run_that_was_stopped_goes_on(
    cluster: stacks.cluster.Cluster, earlier: RunDirectory, original: None, tmp_path: Path
) -> None:
    """It was killed before the filter of iteration 2, and while it wrote into a folder that readers open. Its
    new tables have lists."""
    trained = load_weights(earlier.weights_dir(3))
    for stage in ("filter", "train", "publish"):
        files.remove(earlier.manifest_file(2, stage))
    files.remove(earlier.manifest_file(3, "evaluate"))
    for folder in (
        earlier.partition("batches", 2),
        earlier.weights_dir(3),
        earlier.partition("evaluations", 3),
    ):
        files.remove_folder(folder)
    left = Path(earlier.partition("trajectories", 2), f".rollout-1.parquet.{'0' * 32}.tmp")
    left.write_bytes(b"PAR1")
    age(earlier.uri)
    stored = json.loads(files.read_bytes(earlier.path("config.json")))
    stored["train"]["iterations"] = 4
    files.write_atomic(earlier.path("config.json"), json.dumps(stored).encode())
    before = {uri: files.describe(uri) for uri in earlier.list_partitions("trajectories")[2]}

    done = stacks.quickstart.sf(tmp_path, "resume", earlier.uri, on=cluster.services)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not left.exists() and {uri: files.describe(uri) for uri in before} == before
    # the rows are the same, so the weights are too
    again = load_weights(earlier.weights_dir(3))
    assert all(float((again[name] - trained[name]).abs().max()) < MOST_ROUNDED for name in trained)

    # a mixed folder is read
    assert versions(earlier, "trajectories") == {0: ["4"], 1: ["4"], 2: ["4"], 3: ["5"]}
    assert versions(earlier, "batches") == {0: ["4"], 1: ["4"], 2: ["5"], 3: ["5"]}
    assert versions(earlier, "evaluations") == {0: ["4"], 3: ["5"], 4: ["5"]}
    assert len(open_run(earlier.uri).sessions()) == 4 * 24 + 3 * 16
    assert "bit for bit" in stacks.quickstart.read("replay", earlier.uri, "--iteration", "3")
    assert "96 conversations" in stacks.quickstart.read(
        "export", earlier.uri, "--to", "trl", str(tmp_path / "out.jsonl")
    )
    stacks.quickstart.read("report", earlier.uri, "-o", str(tmp_path / "report.html"))
    asked = ("--version", "4", *stacks.quickstart.options(evaluate__num_tasks=3))
    done = stacks.quickstart.sf(tmp_path, "evaluate", earlier.uri, *asked, on=cluster.services)
    assert done.returncode == 0 and "3 tasks of" in done.stdout, done.stdout + done.stderr

    stacks.quickstart.read("export", earlier.uri, "--to", "parquet", str(tmp_path / "tables"))
    rows = pd.read_parquet(tmp_path / "tables" / "trajectories")
    assert {part["name"] for parts in rows["reward_parts"] for part in parts} == {"answer"}
