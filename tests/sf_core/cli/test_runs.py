"""What the commands on run directories take and print."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sf_core.cli.main import app
from storage.run_directory import RunDirectory
from tests.bench import runs


def sf(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_found_by_its_name_in_the_usual_folder(here: Path) -> None:
    runs.configure(RunDirectory(str(here / "runs" / "mine")))
    for command in ("inspect", "gc"):
        assert sf(command, "mine") == sf(command, "runs/mine")
    assert sf("inspect", "mine")[0] == 0
    (here / "mine").mkdir()
    code, output = sf("inspect", "mine")
    assert (code, "mine: no run here" in output) == (2, True), output


def test_a_run_that_has_not_begun_is_told_from_none(here: Path) -> None:
    (here / "runs" / "new" / "logs").mkdir(parents=True)
    code, output = sf("inspect", "runs/new")
    assert code == 2
    assert "runs/new: the run has not begun (config.json is missing); logs of its start: " in output
    elsewhere = RunDirectory("memory://elsewhere/new")
    Path(elsewhere.local_dir, "logs").mkdir(parents=True)
    assert f"logs of its start: {elsewhere.local_dir}/logs" in sf("inspect", elsewhere.uri)[1]
    (here / "runs" / "empty").mkdir()
    assert "did you mean empty" not in sf("inspect", "runs/empty")[1]


def test_programs_read_runs_what_can_be_removed_and_iterations_as_json(here: Path) -> None:
    run = RunDirectory(str(here / "runs" / "mine"))
    runs.configure(run, train={"iterations": 3})
    runs.pretend(run, 3)
    [row] = json.loads(sf("ls", "--json")[1])
    assert (row["name"], row["state"], row["iterations"], row["progress"]["published"]) == (
        "mine",
        "finished",
        3,
        3,
    )
    spared = json.loads(sf("gc", "mine", "--json")[1])
    assert spared["removed"] is False
    assert {item["name"] for item in spared["items"]} >= {"weights/v00001", "weights/v00002"}
    sampled = RunDirectory(str(here / "runs" / "sampled"))
    runs.configure(sampled)
    runs.sample(
        sampled,
        0,
        [runs.conversation([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])],
    )
    [iteration] = json.loads(sf("inspect", "sampled", "--json")[1])["iterations"]
    assert (iteration["iteration"], iteration["stages"], iteration["sessions"]) == (0, ["rollout"], 1)
    code, output = sf("inspect", "sampled", "--json", "--timeline")
    assert (code, "leave --session, --timeline and --tasks out" in output) == (2, True)


def test_a_missing_folder_is_not_made_for_an_output(here: Path) -> None:
    runs.configure(RunDirectory(str(here / "runs" / "mine")))
    page = ("report", "mine", "-o", "no/page.html")
    rows = ("export", "mine", "no/x.jsonl", "--to", "trl")
    for command in (page, rows):
        code, output = sf(*command)
        assert (code, "no does not exist: create this folder first" in output) == (2, True), output
    assert not (here / "no").exists()
