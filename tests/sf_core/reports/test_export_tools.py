"""Tools of trajectories for which Parquet has no type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sf_core.reports.export.export import export
from storage.run_directory import RunDirectory
from tests.bench.runs import configure, conversation, sample

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize("value", [2**64, "\ud800", {}], ids=["large", "half a character", "empty"])
def test_conversations_with_such_tools_are_left_out_and_counted(tmp_path: Path, value: Any) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    configure(run)
    function = {"name": "look", "parameters": {"type": "object", "maximum": value}}
    tools = json.dumps([{"type": "function", "function": function}])
    sample(run, 0, [conversation(CHAT), conversation(CHAT, session_id="s1", tools=tools)])
    exported = export(run.uri, "verl", str(tmp_path / "out.parquet"))
    assert (exported.rows, exported.left_out) == (1, {"the tools have no Parquet type": 1})
