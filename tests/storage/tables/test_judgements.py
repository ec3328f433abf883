"""The table of judgements, of iterations and of evaluations."""

from __future__ import annotations

from pathlib import Path

from storage.run_directory import RunDirectory
from storage.tables.judgements import SCHEMA, Judgement, read_judgements, write_judgements
from storage.tables.parquet import read_table, write_table
from tests.bench.runs import commit

ASKED = Judgement(
    judge="taste", item="style", pair=3, messages="[]", reply="7", verdict="7", tokens=9, discarded=["length"]
)
NOTED = Judgement(item="length", verdict="3.0")


def test_judgements_of_an_iteration_and_of_the_evaluation_before_it_stay_apart(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    sampled = write_judgements(run, 0, [("g", ASKED), ("g", NOTED)], "rollout-1")
    held_out = write_judgements(run, 0, [("e", NOTED)], "evaluation-1", "evaluations")
    for stage, ref in (("evaluate", held_out), ("rollout", sampled)):
        # removes files of attempts that died from the folders that it names
        commit(run, 0, stage, outputs=[ref])
    found = {
        stage: read_judgements(run, run.read_committed(0, stage)).to_pylist()
        for stage in ("rollout", "evaluate")
    }
    assert [row["session_id"] for row in found["rollout"]] == ["g", "g"]
    assert [row["session_id"] for row in found["evaluate"]] == ["e"]
    assert found["rollout"][0] == {
        "run_id": "run",
        "session_id": "g",
        "judge": "taste",
        "item": "style",
        "pair": 3,
        "messages": "[]",
        "reply": "7",
        "verdict": "7",
        "tokens": 9,
        "seconds": 0.0,
        "attempts": 0,
        "cached": False,
        "discarded": ["length"],
    }
    assert (found["rollout"][1]["judge"], found["rollout"][1]["verdict"]) == (None, "3.0")


def test_a_file_of_before_replies_were_discarded_is_read(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    ref = write_judgements(run, 0, [("g", ASKED)], "rollout-1")
    old = read_table(run.path(ref.uri)).drop_columns(["discarded"])
    commit(run, 0, "rollout", outputs=[run.relative(write_table(run.path(ref.uri), old))])
    [row] = read_judgements(run, run.read_committed(0, "rollout")).to_pylist()
    assert (row["reply"], row["discarded"]) == ("7", [])


def test_a_manifest_without_judgements_has_no_rows(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    commit(run, 0, "rollout")
    assert read_judgements(run, run.read_committed(0, "rollout")) == SCHEMA.empty_table()
