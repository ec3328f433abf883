from typing import Any

import pytest
from pydantic import BaseModel

from storage import files
from storage.attempts import Attempt
from storage.files import FileRef
from storage.manifests import Manifest
from storage.run_directory import RunDirectory


def manifest(iteration: int | None = 0, stage: str = "rollout", attempt: int = 1, **more: Any) -> Manifest:
    return Manifest(run_id="run-1", iteration=iteration, stage=stage, attempt=attempt, **more)


def output(run: RunDirectory, data: bytes, part: str = "part-1") -> FileRef:
    return files.write_atomic(f"{run.partition('trajectories', 0)}/{part}.parquet", data)


def test_the_run_id_is_the_name_of_the_folder(run: RunDirectory) -> None:
    assert run.run_id == "run-1"


def test_a_manifest_is_read_back_as_committed(run: RunDirectory) -> None:
    committed = run.commit_manifest(
        manifest(inputs={"weights": "3"}, outputs=[output(run, b"rows")], data={"groups": [1, 2]})
    )
    assert run.read_manifest(0, "rollout") == committed
    assert committed.outputs[0].uri == "trajectories/iteration=0/part-1.parquet"
    assert files.read_bytes(run.path(committed.outputs[0].uri)) == b"rows"
    run.verify(committed)


def test_an_uncommitted_stage_has_no_manifest(run: RunDirectory) -> None:
    assert run.read_manifest(0, "rollout") is None
    assert run.read_manifest(None, "start") is None


def test_a_manifest_of_the_run_has_no_iteration(run: RunDirectory) -> None:
    run.commit_manifest(manifest(None, "start", data={"source": "model"}))
    assert files.exists(run.path("manifests", "start.json"))
    kept = run.read_manifest(None, "start")
    assert kept is not None
    assert kept.data == {"source": "model"}


def test_committing_equal_outputs_again_keeps_the_first(run: RunDirectory) -> None:
    ref = output(run, b"rows")
    first = run.commit_manifest(manifest(attempt=1, outputs=[ref], data={"seconds": 1}))
    again = run.commit_manifest(manifest(attempt=2, outputs=[ref], data={"seconds": 2}))
    assert again == first


def test_committing_other_outputs_is_refused(run: RunDirectory) -> None:
    first = run.commit_manifest(manifest(attempt=1, outputs=[output(run, b"rows", "part-1")]))
    with pytest.raises(ValueError, match="rollout of iteration 0 was committed by attempt 1"):
        run.commit_manifest(manifest(attempt=2, outputs=[output(run, b"others", "part-2")]))
    assert run.read_manifest(0, "rollout") == first
    run.verify(first)


def test_what_cannot_be_read_back_is_not_committed(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="manifest is for run_id 'other', expected 'run-1'"):
        run.commit_manifest(Manifest(run_id="other", iteration=0, stage="rollout", attempt=1))
    assert run.read_manifest(0, "rollout") is None


@pytest.mark.parametrize("length", [0, 1, 40, -1])
def test_a_half_written_manifest_is_named_and_not_taken_for_a_commit(run: RunDirectory, length: int) -> None:
    run.commit_manifest(manifest())
    uri = run.manifest_file(0, "rollout")
    files.write_atomic(uri, files.read_bytes(uri)[:length])
    with pytest.raises(ValueError, match=r"rollout\.json: manifest cannot be read .* remove the file"):
        run.read_manifest(0, "rollout")
    with pytest.raises(ValueError, match="manifest cannot be read"):
        run.commit_manifest(manifest(attempt=2))


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        (
            Manifest(run_id="run-2", iteration=0, stage="rollout", attempt=1),
            "run_id 'run-2', expected 'run-1'",
        ),
        (manifest(3, "rollout"), "iteration 3, expected 0"),
        (manifest(0, "filter"), "stage 'filter', expected 'rollout'"),
    ],
)
def test_a_manifest_of_something_else_is_refused(run: RunDirectory, stored: Manifest, sentence: str) -> None:
    files.write_atomic(run.manifest_file(0, "rollout"), stored.model_dump_json().encode())
    with pytest.raises(ValueError, match=sentence):
        run.read_manifest(0, "rollout")


def test_sizes_are_verified_without_reading(run: RunDirectory) -> None:
    committed = run.commit_manifest(manifest(outputs=[output(run, b"rows")]))
    uri = run.path(committed.outputs[0].uri)
    files.write_atomic(uri, b"rowz")
    run.verify_sizes(committed)
    files.write_atomic(uri, b"row")
    with pytest.raises(ValueError, match="has 3 bytes, rollout of iteration 0 wrote 4"):
        run.verify_sizes(committed)
    files.remove(uri)
    with pytest.raises(ValueError, match="missing, but rollout of iteration 0 is committed"):
        run.verify_sizes(committed)


def test_verify_finds_missing_truncated_and_changed_outputs(run: RunDirectory) -> None:
    committed = run.commit_manifest(manifest(outputs=[output(run, b"rows")]))
    uri = run.path(committed.outputs[0].uri)
    for damage, sentence in [(b"row", "has 3 bytes, rollout of iteration 0 wrote 4"), (b"rowz", "differs")]:
        files.write_atomic(uri, damage)
        with pytest.raises(ValueError, match=sentence):
            run.verify(committed)
    files.remove(uri)
    with pytest.raises(ValueError, match="missing, but rollout of iteration 0 is committed"):
        run.verify(committed)


def test_attempts_count_up_and_only_the_latest_commits(run: RunDirectory) -> None:
    assert [run.begin_attempt(), run.begin_attempt()] == [1, 2]
    with pytest.raises(ValueError, match="attempt 1 was superseded by a later one and must not commit"):
        run.commit_manifest(manifest(attempt=1))
    committed = run.commit_manifest(manifest(attempt=2))
    assert run.read_manifest(0, "rollout") == committed


def test_of_the_newest_attempt_alone_it_is_noted_that_its_data_plane_is_gone(run: RunDirectory) -> None:
    run.begin_attempt(Attempt(dataplane="http://127.0.0.1:1", host="here"))
    run.end_attempt("http://127.0.0.1:1", "elsewhere")
    assert run.newest_attempt().dataplane == "http://127.0.0.1:1"
    run.end_attempt("http://127.0.0.1:1", "here")
    assert run.newest_attempt() == Attempt(dataplane="", host="here")
    later = Attempt(dataplane="http://127.0.0.1:2", host="here")
    run.begin_attempt(later)
    run.end_attempt("http://127.0.0.1:1", "here")
    assert run.newest_attempt() == later


def test_the_newest_attempt_says_which_data_plane_serves_it(run: RunDirectory) -> None:
    assert run.newest_attempt() == Attempt()
    run.begin_attempt(Attempt(dataplane="http://127.0.0.1:1"))
    newest = Attempt(dataplane="http://127.0.0.1:2", evaluate_only=True)
    run.begin_attempt(newest)
    assert run.newest_attempt() == newest


@pytest.mark.parametrize("text", [b"", b"{"])
def test_an_attempt_that_cannot_be_read_is_named(run: RunDirectory, text: bytes) -> None:
    files.write_atomic(run.path("attempts", "00001"), text)
    with pytest.raises(ValueError, match=r"attempts/00001: attempt cannot be read: "):
        run.newest_attempt()


def test_a_summary_is_read_back_and_a_broken_one_is_named(run: RunDirectory) -> None:
    assert run.read_summary() is None
    run.write_summary({"iterations": 3})
    assert run.read_summary() == {"iterations": 3}
    for broken in (b"", b"[]", b'{"iterations": '):
        files.write_atomic(run.path("summary.json"), broken)
        with pytest.raises(ValueError, match=r"summary\.json: cannot be read: "):
            run.read_summary()


def test_parts_of_attempts_that_never_committed_are_removed_on_commit(run: RunDirectory) -> None:
    output(run, b"half of the rows", "shard-0-attempt-1")
    elsewhere = files.write_atomic(f"{run.partition('trajectories', 1)}/shard-0-attempt-1.parquet", b"next")
    metrics = files.write_atomic(run.metrics_file("train", 7), b"of another iteration")
    own_metrics = files.write_atomic(run.metrics_file("train", 0), b"own")
    kept = output(run, b"all rows", "shard-0-attempt-2")
    run.commit_manifest(manifest(attempt=2, outputs=[kept, own_metrics]))
    assert files.list_files(run.partition("trajectories", 0)) == [kept.uri]
    assert files.exists(elsewhere.uri)
    assert files.exists(metrics.uri)


def test_timelines_are_read_in_the_order_of_their_names(run: RunDirectory) -> None:
    assert run.read_timelines() == {}
    run.write_timeline("t0-train-0.1", 5.0, b"[2]")
    run.write_timeline("r0-rollout-0.1", 9.0, b"[1]")
    assert list(run.read_timelines().values()) == [b"[1]", b"[2]"]
    assert list(run.read_timelines(since=6.0).values()) == [b"[1]"]
    run.write_timeline("t0-train-0.1", 7205.0, b"[3]")
    assert list(run.read_timelines(since=8.0).values()) == [b"[1]", b"[3]"]
    assert list(run.read_timelines(since=10.0).values()) == [b"[3]"]


def test_timelines_of_runs_without_hours_are_read_too(run: RunDirectory) -> None:
    files.write_atomic(run.path("timeline", "t0-train-0.1.5000000.json"), b"[1]")
    run.write_timeline("t0-train-0.1", 7205.0, b"[2]")
    assert list(run.read_timelines().values()) == [b"[1]", b"[2]"]


class Config(BaseModel):
    seed: int


def test_the_configuration_is_read_back(run: RunDirectory) -> None:
    run.write_config(Config(seed=7))
    assert run.read_config(Config) == Config(seed=7)


def test_a_folder_without_configuration_is_no_run(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match=r"run-1: no run here \(config.json is missing\)"):
        run.read_config(Config)


def test_a_broken_configuration_is_named(run: RunDirectory) -> None:
    files.write_atomic(run.path("config.json"), b'{"seed": ')
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        run.read_config(Config)
