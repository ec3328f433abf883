from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.journal.ownership import OpenRuns
from sf_core.dataplane.options import DataplaneOptions
from tests.bench.dataplane.specs import SPEC


def test_one_process_at_a_time_works_in_a_journal_directory(tmp_path: Path) -> None:
    first = OpenRuns(tmp_path)
    (tmp_path / "run.journal").touch()
    first.add("run", tmp_path / "run.journal")
    with pytest.raises(ValueError, match="another data plane uses"):
        OpenRuns(tmp_path)
    first.close()
    second = OpenRuns(tmp_path)
    assert second.journals == [tmp_path / "run.journal"]
    second.remove("run")
    second.close()
    third = OpenRuns(tmp_path)
    assert third.journals == []
    third.close()


@pytest.mark.parametrize("damaged", ["model folder", "journal"])
async def test_a_run_that_cannot_be_opened_keeps_no_other_one_from_being_served(
    tmp_path: Path, model_dir: str, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    own_model = tmp_path / "model"
    shutil.copytree(model_dir, own_model)
    with caplog.at_level(logging.WARNING, "sf_core.dataplane"):
        plane = DataPlane(DataplaneOptions(str(tmp_path / "plane")))
        for run_id, model in (("bad", str(own_model)), ("good", model_dir)):
            facts = {"run_id": run_id, "run_dir": str(tmp_path / run_id), "model_dir": model}
            await plane.register(RunSpec.model_validate(SPEC | facts))
        if damaged == "journal":
            await plane.runs["bad"].journal.append({"weights": 5})
        else:
            (own_model / "tokenizer.json").write_text("{", encoding="utf-8")
        await plane.close()
        again = DataPlane(DataplaneOptions(str(tmp_path / "plane")))
        await again.reopen()
        await again.close()
        assert list(again.runs) == ["good"]
    [line] = caplog.messages
    assert "bad.journal: the run cannot be served: " in line
    assert "start the flow of the run again" in line
    assert ("was written by another version" in line) == (damaged == "journal")
