"""vLLM's own parsers over the table of edge cases."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bench.waits import patience
from tests.sf_core.dataplane.chat.calls import edge_cases


def vllm_calls(python: str) -> list[list[tuple[str, Any]]]:
    """The calls that vLLM reads in each case."""
    texts = [(case.form.replace("_named", ""), case.text) for case in edge_cases.CASES]
    done = subprocess.run(
        [python, str(Path(__file__).with_name("vllm_calls.py"))],
        input=json.dumps({"tools": edge_cases.TOOLS, "texts": texts}),
        capture_output=True,
        text=True,
        timeout=patience() * 4,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return [[(name, _read(arguments)) for name, arguments in calls] for calls in json.loads(done.stdout)]


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _expected(case: edge_cases.Case) -> list[tuple[str, Any]]:
    same = [(call.name, call.arguments) for call in case.ours]
    return edge_cases.DIFFERENT.get((case.form, case.title), (same, ""))[0]


# needs vLLM's own parsers, 30 CPU-seconds of imports
@pytest.mark.nightly
def test_vllm_reads_the_same_calls_but_for_the_differences_in_the_table(vllm: str) -> None:
    read = {
        (case.form, case.title): calls for case, calls in zip(edge_cases.CASES, vllm_calls(vllm), strict=True)
    }
    # nan equals nothing
    assert {key: repr(calls) for key, calls in read.items()} == {
        (case.form, case.title): repr(_expected(case)) for case in edge_cases.CASES
    }
