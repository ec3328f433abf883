"""One contract for all filesystems: each test with `run` holds on local paths, memory:// and an S3 server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from storage.run_directory import RunDirectory


@pytest.fixture(params=["file", "memory", "s3"])
def run_anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunDirectory]:
    if request.param == "file":
        yield RunDirectory(str(tmp_path / "run-1"))
        return
    if request.param == "s3":
        yield RunDirectory(f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4().hex}/run-1")
        return
    root = f"memory://{uuid.uuid4().hex}"
    yield RunDirectory(f"{root}/run-1")
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(root):
        filesystem.rm(root, recursive=True)
