"""A data set is tried on this host before a run trusts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bench.repositories import rows_of


def check(folder: Path, rows: list[dict[str, Any]], generated: Path) -> subprocess.CompletedProcess[str]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = {"dataset": f"{folder}/rows.jsonl", "repositories": f"{generated}/repositories"}
    (folder / "run.yaml").write_text(
        yaml.safe_dump({"environment": {"name": "repositories", "settings": settings}}), encoding="utf-8"
    )
    words = [sys.executable, "-m", "sf_core.environments.repositories.check", f"{folder}/run.yaml"]
    return subprocess.run(words, capture_output=True, encoding="utf-8")


def test_it_says_of_each_instance_that_is_not_right_what_tells_so(generated: Path, tmp_path: Path) -> None:
    right, other = rows_of(generated)[:2]
    gone = json.loads(right["FAIL_TO_PASS"])[0].partition("::")[0] + "::test_of_another_time"
    rows = [
        right,
        other | {"instance_id": "a", "patch": ""},
        right | {"instance_id": "b", "PASS_TO_PASS": json.dumps([gone])},
        right | {"instance_id": "c", "FAIL_TO_PASS": right["PASS_TO_PASS"]},
        right | {"instance_id": "d", "test_patch": right["test_patch"] * 2},
    ]
    done = check(tmp_path, rows, generated)
    a, b, c, d, told = done.stdout.splitlines()
    assert a.startswith("a: with the patch applied, ") and " fails: " in a
    assert b == f"b: with the patch applied, pytest finds no {gone}"
    assert c == "c: the tests pass without the patch"
    assert d == "d: the test_patch does not apply to base_commit"
    assert (told, done.returncode) == ("1 of 5 instances work on this host", 1)


def test_a_data_set_that_is_right_ends_well(generated: Path, tmp_path: Path) -> None:
    rows = rows_of(generated)[:1]
    done = check(tmp_path, rows, generated)
    assert (done.stdout, done.returncode) == ("1 of 1 instances work on this host\n", 0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"name": "quickstart", "settings": {}},
            "environment.name is quickstart, but this command needs environment.name repositories",
        ),
        ({"settings": {"dataset": "/gone.jsonl", "repositories": "/gone"}}, "/gone.jsonl cannot be read: "),
    ],
)
def test_what_cannot_be_checked_is_refused_in_a_sentence(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({"environment": {"name": "repositories"} | change}), encoding="utf-8"
    )
    words = [sys.executable, "-m", "sf_core.environments.repositories.check", f"{tmp_path}/run.yaml"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8")
    assert done.returncode == 1 and done.stderr.startswith(sentence) and done.stderr.count("\n") == 1
