"""A try that is over writes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from sf_core.training.gang import SupersededError, check_counts
from storage import files
from storage.gangs import GangFiles
from storage.run_directory import RunDirectory
from tests.sf_core.runs import commit


@pytest.mark.parametrize("end", ["the flow ended it", "a later attempt began", "another try committed"])
def test_a_try_that_is_over_replaces_no_file(tmp_path: Path, end: str) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    assert run.begin_attempt() == 1
    one_try = GangFiles(run, 4, attempt=1, epoch=0)
    uri = run.path("weights", "v00005", "model.safetensors")
    with files.fenced(partial(check_counts, one_try)), pytest.raises(SupersededError, match="iteration 4"):
        files.write_atomic(uri, b"by this try")
        with files.writer(uri) as file:
            file.write(b"late")
            if end == "the flow ended it":
                one_try.end()
            elif end == "a later attempt began":
                run.begin_attempt()
            else:
                commit(run, 4, "train")
    assert files.read_bytes(uri) == b"by this try"
