from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.dataplane.open_runs import OpenRuns


def test_one_process_at_a_time_works_in_a_journal_directory(tmp_path: Path) -> None:
    first = OpenRuns(tmp_path)
    (tmp_path / "run.journal").touch()
    first.add("run", tmp_path / "run.journal")
    with pytest.raises(ValueError, match="another data plane works in"):
        OpenRuns(tmp_path)
    first.close()
    second = OpenRuns(tmp_path)
    assert second.journals == [tmp_path / "run.journal"]
    second.remove("run")
    second.close()
    third = OpenRuns(tmp_path)
    assert third.journals == []
    third.close()
