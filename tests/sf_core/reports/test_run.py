"""The public reader of a run, on small run directories as stages leave them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamlessflow import Run, open_run
from sf_core.config import RunConfig
from sf_core.models.tokenizer import open_tokenizer
from sf_core.reports.sessions import SESSIONS, TURNS, turns_of
from storage.run_directory import RunDirectory
from storage.tables.schema import NOT_SAMPLED, Trajectory, TurnSpan
from storage.tables.trajectories import read_trajectories
from tests.bench.recorded_run import FIRST, record, row


@pytest.fixture
def directory(runs_root: str, small_policy: str) -> RunDirectory:
    """A run with a complete iteration, and a second one that has its sessions only."""
    run = RunDirectory(f"{runs_root}/run-1")
    record(run, small_policy)
    return run


@pytest.fixture
def run(directory: RunDirectory) -> Run:
    return open_run(directory.uri)


def test_a_run_knows_its_name_and_its_settings(run: Run, directory: RunDirectory) -> None:
    assert (run.run_id, run.uri, repr(run)) == ("run-1", directory.uri, f"open_run({directory.uri!r})")
    assert run.settings["seed"] == 7 and run.settings["train"]["iterations"] > 0


def test_iterations_have_rewards_and_metrics_of_what_is_committed(run: Run) -> None:
    first, second = run.iterations().to_pylist()
    assert first == {
        "iteration": 0,
        "published": True,
        "reward": 0.5,
        "held_out": 0.75,
        "sessions": 2,
        "failed": 1,
        "seconds": 10.0,
        "sampled_tokens": 6,
        "loss": 1.0,
        "ratio_max": 3.0,
        "kl": 1.0,
    }
    assert (second["published"], second["reward"], second["held_out"]) == (False, 1.0, None)
    assert second["seconds"] is second["loss"] is None


def test_evaluations_begin_with_the_policy_before_training(run: Run) -> None:
    found = run.evaluations().to_pylist()
    assert [one["version"] for one in found] == [0, 1]
    assert [one["reward"] for one in found] == [one["reward_sums"] for one in found] == [0.25, 0.75]
    assert found[0]["seconds"] == 4.0


def test_a_session_is_one_row_whatever_its_branches(run: Run) -> None:
    table = run.sessions()
    assert table.schema.names == [name for name in SESSIONS.names if name not in ("policy", "messages")][:-2]
    found = {one["session_id"]: one for one in table.to_pylist()}
    assert list(found) == [
        *("run-1.e0.0", "run-1.g0.0", "run-1.g0.1", "run-1.e1.0", "run-1.g3.0", "run-1.open.0")
    ]
    forked = found["run-1.g0.0"]
    counts = ("branches", "answers", "tokens", "interruptions", "min_version", "max_version", "seconds")
    assert [forked[name] for name in counts] == [2, 2, 5, 2, 0, 1, 1.5]
    assert [one["kind"] for one in found.values()] == [
        *("held_out", "training", "training", "held_out", "training", "opened")
    ]
    assert found["run-1.g0.1"]["reward_parts"] == [{"name": "answer", "value": 0.5}]


def test_columns_are_read_by_name_and_unknown_ones_are_refused(run: Run) -> None:
    table = run.sessions(["session_id", "output", "reward"])
    assert table.schema.names == ["session_id", "output", "reward"]
    assert table["output"].to_pylist()[1] == "hello"
    with pytest.raises(ValueError, match=r"^sessions have no column 'rewrd'; did you mean reward\?$"):
        run.sessions(["rewrd"])


def test_groups_are_those_of_batches_and_those_that_were_discarded(run: Run) -> None:
    names = ("group_id", "iteration", "verdict", "sessions", "reward_mean", "reward_max", "tokens")
    assert [tuple(one[name] for name in names) for one in run.groups().to_pylist()] == [
        ("run-1.g0", 0, "sealed", 2, 0.5, 1.0, 6),
        ("run-1.g1", 0, "equal_rewards", 2, 0.75, 1.0, 20),
        ("run-1.g2", 0, "max_lag", 0, None, None, None),
        ("run-1.g3", 1, "sealed", 1, 1.0, 1.0, 2),
    ]


def test_a_session_is_shown_turn_by_turn(run: Run, directory: RunDirectory) -> None:
    turns = run.session("run-1.g0.0")
    assert turns.schema == TURNS
    assert turns["branch_id"].to_pylist() == ["run-1.g0.0.b0"] * 2 + ["run-1.g0.0.b1"] * 4
    assert turns["turn"].to_pylist() == [0, 1, 0, 1, 2, 3]
    assert turns["repeated"].to_pylist() == [False, False, True, True, False, False]
    assert turns["reward"].to_pylist() == [None] * 5 + [0.25]
    check_turns(directory, turns, FIRST[0], FIRST[2])
    assert turns["logprobs"].to_pylist()[:2] == [[None] * 5, [pytest.approx(-0.3)] * 3]


def test_what_is_not_there_is_named(run: Run, directory: RunDirectory) -> None:
    with pytest.raises(ValueError, match=r"^run-1: no session 'run-1.g0.9'; did you mean run-1.g0.1 or "):
        run.session("run-1.g0.9")
    missing = r"run-2: no run here \(config.json is missing\); .* has the runs run-1; did you mean run-1\?$"
    with pytest.raises(ValueError, match=missing):
        open_run(directory.uri.removesuffix("1") + "2")


def test_a_run_in_the_folder_runs_has_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunDirectory(str(tmp_path / "runs" / "one")).write_config(RunConfig(run_id="one"))
    monkeypatch.chdir(tmp_path)
    assert open_run("one").uri == open_run(Path("runs/one")).uri == str(tmp_path / "runs" / "one")
    with pytest.raises(ValueError, match=r"^runs/two: no run here .*/runs has the runs one$"):
        open_run("two")


def test_a_run_that_has_just_begun_has_empty_tables(tmp_path: Path) -> None:
    RunDirectory(str(tmp_path / "new")).write_config(RunConfig(run_id="new"))
    run = open_run(str(tmp_path / "new"))
    for table in (run.iterations(), run.evaluations(), run.sessions(), run.groups()):
        assert len(table) == 0 and table.schema.names


@st.composite
def branches(draw: st.DrawFn) -> Trajectory:
    versions = draw(st.lists(st.integers(NOT_SAMPLED, 3), max_size=12))
    num = 5 + len(versions)
    cuts = sorted(draw(st.sets(st.integers(1, num - 1), max_size=4)))
    spans = [TurnSpan("user", start, end) for start, end in zip([0, *cuts], [*cuts, num], strict=True)]
    ids = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=num, max_size=num)), np.int32)
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=num, max_size=num))
    shown = row("s", versions, token_ids=ids, turns=spans, shared_prefix=draw(st.integers(0, num)))
    sampled = shown.policy_versions != NOT_SAMPLED
    drawn = np.where(sampled, np.array(logprobs, np.float32), np.float32("nan"))
    return row("s", versions, token_ids=ids, turns=spans, shared_prefix=shown.shared_prefix, logprobs=drawn)


@given(st.lists(branches(), min_size=1, max_size=3))
def test_turns_hold_the_stored_tokens_bit_for_bit(rows: list[Trajectory]) -> None:
    table = turns_of(rows, lambda ids: " ".join(map(str, ids)))
    for name in ("token_ids", "logprobs", "policy_versions", "loss_mask"):
        shown = pa.concat_arrays([chunk.flatten() for chunk in table[name].chunks])
        fill = {"logprobs": np.float32("nan"), "policy_versions": NOT_SAMPLED}.get(name)
        values = (shown if fill is None else shown.fill_null(fill)).to_numpy(zero_copy_only=False)
        stored = np.concatenate([getattr(one, name) for one in rows])
        assert values.dtype == stored.dtype and values.tobytes() == stored.tobytes()


def check_turns(run: RunDirectory, turns: pa.Table, *rows: Trajectory) -> None:
    """Check that the turns hold the ids of the files, and texts that are decodes of them."""
    tokenizer = open_tokenizer(run)
    assert tokenizer is not None
    by_branch = {one.branch_id: one.token_ids.tolist() for one in rows}
    for branch, ids in by_branch.items():
        shown = [one for one in turns.to_pylist() if one["branch_id"] == branch]
        assert [token for one in shown for token in one["token_ids"]] == ids
        for one in shown:
            assert one["text"] == tokenizer.decode(one["token_ids"], skip_special_tokens=False)
            assert len(one["tokens"]) == one["end"] - one["start"] == len(one["token_ids"])
    [uri] = [run.path(ref.uri) for ref in run.read_committed(0, "rollout").files("trajectories")]
    stored = dict(
        zip(*(read_trajectories(uri)[name].to_pylist() for name in ("branch_id", "token_ids")), strict=True)
    )
    assert by_branch == {branch: stored[branch] for branch in by_branch}
