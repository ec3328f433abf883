from pathlib import Path

import pytest
from typer.testing import CliRunner

from sf_core.cli import app


def sf(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("rollout.group_size=0", "rollout.group_size: input should be greater than or equal to 2, got 0"),
        ("trian.iterations=3", "trian: unknown key; allowed here: run_id, seed, pipeline, policy"),
        ("environment.agent=nowhere:agent", "nowhere:agent: cannot import nowhere"),
        ("environment.reward=json:score", "json:score: module json has no score"),
        ("policy.model=/nowhere", "policy.model: /nowhere is not a Hugging Face model folder"),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, setting: str, sentence: str
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"storage:\n  root: {tmp_path / 'runs'}\n")
    code, output = sf("train", str(config), "--set", setting)
    assert (code, sentence in output) == (2, True), output
    assert not (tmp_path / "runs").exists()


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    code, output = sf("train", str(tmp_path / "none.yaml"))
    assert code == 2
    assert "none.yaml: no such file" in output


def test_evaluation_needs_to_know_which_run(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("")
    assert sf("evaluate", str(config)) == (
        2,
        "error: run_id: say which run to evaluate, for example --set run_id=NAME",
    )


def test_inspecting_nothing_says_so(tmp_path: Path) -> None:
    code, output = sf("inspect", str(tmp_path / "nothing"))
    assert code == 2
    assert "no run" in output


def test_a_data_plane_for_the_network_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SF_DATAPLANE_KEY", raising=False)
    code, output = sf("dataplane", "--host", "0.0.0.0")
    assert code == 2
    assert "SF_DATAPLANE_KEY" in output
