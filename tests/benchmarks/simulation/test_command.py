"""`python -m benchmarks.simulation`: what it shows, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.simulation.__main__ import app
from tests.bench.commands import check_refused
from tests.benchmarks.simulation.measured import leave_run

DEVICES = ["--rollout", "1", "--dual", "1"]


def test_the_pipelines_are_compared_with_the_least_that_is_idle(tmp_path: Path) -> None:
    leave_run(str(tmp_path / "first"), iterations=2, rollout=6.0, train=2.0)
    found = CliRunner().invoke(
        app, ["configs/emulated.yaml", *DEVICES, "--measured", str(tmp_path / "first")]
    )
    assert found.exit_code == 0, found.output
    rows = {line.split("  ")[0]: line.split() for line in found.output.splitlines()}
    assert rows.keys() > {"colocated", "colocated, drained", "disaggregated", "async", "multiplexed"}
    # 6 s of rollout on one device, then 2 s of training on the other
    assert "50.0%" in rows["disaggregated"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("nowhere.yaml", "nowhere.yaml"),
        ("run.yaml", "rollout.max_tokens (64) would cut most sessions to one length"),
        ("run.yaml --median 20 --prompt 500", "engine.context_length (512) has no room"),
        ("run.yaml --median 20 --dual-kind k80", "unknown device kind 'k80'"),
        ("run.yaml --set trian.iterations=3", "trian: unknown key"),
        ("run.yaml --dual 0", "--dual"),
        ("run.yaml --sigma -1", "--sigma"),
        ("run.yaml --lengths nowhere", "nowhere"),
        ("run.yaml --lengths nosuch://x", "nosuch://x"),
        ("run.yaml --median 20 --measured nowhere", "nowhere"),
        ("run.yaml --median 20 --picture run.yaml/x.png", "run.yaml"),
    ],
)
def test_a_wrong_argument_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("", encoding="utf-8")
    check_refused(tmp_path, arguments.split(), name, command=app)
