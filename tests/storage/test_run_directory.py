from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from sf_core.config import RunConfig
from storage import files
from storage.files import FileRef
from storage.manifests import Manifest
from storage.run_directory import Attempt, RunDirectory
from tests.bench.runs import stage_data


def manifest(iteration: int | None = 0, stage: str = "rollout", attempt: int = 1, **more: Any) -> Manifest:
    data = stage_data(stage, **more.pop("data", {}))
    return Manifest(run_id="run-1", iteration=iteration, stage=stage, attempt=attempt, data=data, **more)


def output(run: RunDirectory, data: bytes, part: str = "part-1") -> FileRef:
    return files.write_atomic(f"{run.partition('trajectories', 0)}/{part}.parquet", data)


def test_the_run_id_is_the_name_of_the_folder(run_anywhere: RunDirectory) -> None:
    assert run_anywhere.run_id == "run-1"


def test_what_stays_on_this_machine_is_in_a_folder_that_no_other_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    local = RunDirectory("runs/run-1")
    assert local.local_dir == local.uri == str(tmp_path / "runs" / "run-1")
    first = RunDirectory("s3://bucket/a/run-1")
    second = RunDirectory("s3://bucket/b/run-1")
    assert Path(first.local_dir).parent == tmp_path / "runs"
    assert len({local.local_dir, first.local_dir, second.local_dir}) == 3
    # a resumed run finds its own again
    assert RunDirectory("s3://bucket/a/run-1/").local_dir == first.local_dir
    name = Path(first.local_dir).name
    with pytest.raises(ValueError, match="run_id"):
        RunConfig(run_id=name)


def test_a_manifest_is_read_back_as_committed(run_anywhere: RunDirectory) -> None:
    committed = run_anywhere.commit_manifest(
        manifest(inputs={"weights": "3"}, outputs=[output(run_anywhere, b"rows")], data={"groups": [1, 2]})
    )
    assert run_anywhere.read_manifest(0, "rollout") == committed
    assert committed.outputs[0].uri == "trajectories/iteration=0/part-1.parquet"
    assert files.read_bytes(run_anywhere.path(committed.outputs[0].uri)) == b"rows"
    run_anywhere.verify(committed)


def test_an_uncommitted_stage_has_no_manifest(run_anywhere: RunDirectory) -> None:
    assert run_anywhere.read_manifest(0, "rollout") is None
    assert run_anywhere.read_manifest(None, "start") is None


def test_a_manifest_of_the_run_has_no_iteration(run_anywhere: RunDirectory) -> None:
    run_anywhere.commit_manifest(manifest(None, "start", data={"source": "model"}))
    assert files.exists(run_anywhere.path("manifests", "start.json"))
    kept = run_anywhere.read_manifest(None, "start")
    assert kept is not None
    assert kept.data["source"] == "model"


def test_committing_equal_outputs_again_keeps_the_first(run_anywhere: RunDirectory) -> None:
    ref = output(run_anywhere, b"rows")
    first = run_anywhere.commit_manifest(manifest(attempt=1, outputs=[ref], data={"seconds": 1}))
    again = run_anywhere.commit_manifest(manifest(attempt=2, outputs=[ref], data={"seconds": 2}))
    assert again == first


def test_committing_other_outputs_is_refused(run_anywhere: RunDirectory) -> None:
    first = run_anywhere.commit_manifest(
        manifest(attempt=1, outputs=[output(run_anywhere, b"rows", "part-1")])
    )
    with pytest.raises(ValueError, match="rollout of iteration 0 was committed by attempt 1"):
        run_anywhere.commit_manifest(manifest(attempt=2, outputs=[output(run_anywhere, b"others", "part-2")]))
    assert run_anywhere.read_manifest(0, "rollout") == first
    run_anywhere.verify(first)


def test_what_cannot_be_read_back_is_not_committed(run_anywhere: RunDirectory) -> None:
    with pytest.raises(ValueError, match="manifest is for run_id 'other', expected 'run-1'"):
        run_anywhere.commit_manifest(manifest().model_copy(update={"run_id": "other"}))
    assert run_anywhere.read_manifest(0, "rollout") is None


@pytest.mark.parametrize("length", [0, 1, 40, -1])
def test_a_half_written_manifest_is_named_and_not_taken_for_a_commit(
    run_anywhere: RunDirectory, length: int
) -> None:
    run_anywhere.commit_manifest(manifest())
    uri = run_anywhere.manifest_file(0, "rollout")
    files.write_atomic(uri, files.read_bytes(uri)[:length])
    with pytest.raises(ValueError, match=r"rollout\.json: manifest cannot be read .* remove the file"):
        run_anywhere.read_manifest(0, "rollout")
    with pytest.raises(ValueError, match="manifest cannot be read"):
        run_anywhere.commit_manifest(manifest(attempt=2))


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        (
            manifest().model_copy(update={"run_id": "run-2"}),
            "run_id 'run-2', expected 'run-1'",
        ),
        (manifest(3, "rollout"), "iteration 3, expected 0"),
        (manifest(0, "filter"), "stage 'filter', expected 'rollout'"),
    ],
)
def test_a_manifest_of_something_else_is_refused(
    run_anywhere: RunDirectory, stored: Manifest, sentence: str
) -> None:
    files.write_atomic(run_anywhere.manifest_file(0, "rollout"), stored.model_dump_json().encode())
    with pytest.raises(ValueError, match=sentence):
        run_anywhere.read_manifest(0, "rollout")


def test_sizes_are_verified_without_reading(run_anywhere: RunDirectory) -> None:
    committed = run_anywhere.commit_manifest(manifest(outputs=[output(run_anywhere, b"rows")]))
    uri = run_anywhere.path(committed.outputs[0].uri)
    files.write_atomic(uri, b"rowz")
    run_anywhere.verify_sizes(committed)
    files.write_atomic(uri, b"row")
    with pytest.raises(ValueError, match="has 3 bytes, but rollout of iteration 0 wrote 4"):
        run_anywhere.verify_sizes(committed)
    files.remove(uri)
    with pytest.raises(ValueError, match="missing, but rollout of iteration 0 is committed"):
        run_anywhere.verify_sizes(committed)


def test_verify_finds_missing_truncated_and_changed_outputs(run_anywhere: RunDirectory) -> None:
    committed = run_anywhere.commit_manifest(manifest(outputs=[output(run_anywhere, b"rows")]))
    uri = run_anywhere.path(committed.outputs[0].uri)
    for damage, sentence in [
        (b"row", "has 3 bytes, but rollout of iteration 0 wrote 4"),
        (b"rowz", "differs"),
    ]:
        files.write_atomic(uri, damage)
        with pytest.raises(ValueError, match=sentence):
            run_anywhere.verify(committed)
    files.remove(uri)
    with pytest.raises(ValueError, match="missing, but rollout of iteration 0 is committed"):
        run_anywhere.verify(committed)


def test_attempts_count_up_and_only_the_latest_commits(run_anywhere: RunDirectory) -> None:
    assert [run_anywhere.begin_attempt(), run_anywhere.begin_attempt()] == [1, 2]
    with pytest.raises(ValueError, match="attempt 1 was superseded by a later attempt and must not commit"):
        run_anywhere.commit_manifest(manifest(attempt=1))
    committed = run_anywhere.commit_manifest(manifest(attempt=2))
    assert run_anywhere.read_manifest(0, "rollout") == committed


def test_of_the_newest_attempt_alone_it_is_noted_that_its_data_plane_is_gone(
    run_anywhere: RunDirectory,
) -> None:
    run_anywhere.begin_attempt(Attempt(dataplane="http://127.0.0.1:1", host="here"))
    run_anywhere.end_attempt("http://127.0.0.1:1", "elsewhere")
    assert run_anywhere.newest_attempt().dataplane == "http://127.0.0.1:1"
    run_anywhere.end_attempt("http://127.0.0.1:1", "here")
    assert run_anywhere.newest_attempt() == Attempt(dataplane="", host="here")
    later = Attempt(dataplane="http://127.0.0.1:2", host="here")
    run_anywhere.begin_attempt(later)
    run_anywhere.end_attempt("http://127.0.0.1:1", "here")
    assert run_anywhere.newest_attempt() == later


def test_the_newest_attempt_says_which_data_plane_serves_it(run_anywhere: RunDirectory) -> None:
    assert run_anywhere.newest_attempt() == Attempt()
    run_anywhere.begin_attempt(Attempt(dataplane="http://127.0.0.1:1"))
    newest = Attempt(dataplane="http://127.0.0.1:2", evaluate_only=True)
    run_anywhere.begin_attempt(newest)
    assert run_anywhere.newest_attempt() == newest


@pytest.mark.parametrize("text", [b"", b"{"])
def test_an_attempt_that_cannot_be_read_is_named(run_anywhere: RunDirectory, text: bytes) -> None:
    files.write_atomic(run_anywhere.path("attempts", "00001"), text)
    with pytest.raises(ValueError, match=r"attempts/00001: attempt cannot be read: "):
        run_anywhere.newest_attempt()


def test_a_summary_is_read_back_and_a_broken_one_is_named(run_anywhere: RunDirectory) -> None:
    assert run_anywhere.read_summary() is None
    run_anywhere.write_summary({"iterations": 3})
    assert run_anywhere.read_summary() == {"iterations": 3}
    for broken in (b"", b"[]", b'{"iterations": '):
        files.write_atomic(run_anywhere.path("summary.json"), broken)
        with pytest.raises(ValueError, match=r"summary\.json: cannot be read: "):
            run_anywhere.read_summary()


def test_parts_of_attempts_that_never_committed_are_removed_on_commit(run_anywhere: RunDirectory) -> None:
    output(run_anywhere, b"half of the rows", "shard-0-attempt-1")
    elsewhere = files.write_atomic(
        f"{run_anywhere.partition('trajectories', 1)}/shard-0-attempt-1.parquet", b"next"
    )
    metrics = files.write_atomic(run_anywhere.metrics_file("train", 7), b"of another iteration")
    own_metrics = files.write_atomic(run_anywhere.metrics_file("train", 0), b"own")
    kept = output(run_anywhere, b"all rows", "shard-0-attempt-2")
    run_anywhere.commit_manifest(manifest(attempt=2, outputs=[kept, own_metrics]))
    assert files.list_files(run_anywhere.partition("trajectories", 0)) == [kept.uri]
    assert files.exists(elsewhere.uri)
    assert files.exists(metrics.uri)


def test_timelines_are_read_in_the_order_of_their_names(run_anywhere: RunDirectory) -> None:
    assert run_anywhere.read_timelines() == {}
    run_anywhere.write_timeline("t0-train-0.1", 5.0, b"[2]")
    run_anywhere.write_timeline("r0-rollout-0.1", 9.0, b"[1]")
    assert list(run_anywhere.read_timelines().values()) == [b"[1]", b"[2]"]
    assert list(run_anywhere.read_timelines(since=6.0).values()) == [b"[1]"]
    run_anywhere.write_timeline("t0-train-0.1", 7205.0, b"[3]")
    assert list(run_anywhere.read_timelines(since=8.0).values()) == [b"[1]", b"[3]"]
    assert list(run_anywhere.read_timelines(since=10.0).values()) == [b"[3]"]


def test_timelines_of_runs_without_hours_are_read_too(run_anywhere: RunDirectory) -> None:
    files.write_atomic(run_anywhere.path("timeline", "t0-train-0.1.5000000.json"), b"[1]")
    run_anywhere.write_timeline("t0-train-0.1", 7205.0, b"[2]")
    assert list(run_anywhere.read_timelines().values()) == [b"[1]", b"[2]"]


class Config(BaseModel):
    seed: int


def test_the_configuration_is_read_back(run_anywhere: RunDirectory) -> None:
    run_anywhere.write_config(Config(seed=7))
    assert run_anywhere.read_config(Config) == Config(seed=7)


def test_a_folder_without_configuration_is_no_run(run_anywhere: RunDirectory) -> None:
    with pytest.raises(ValueError, match=r"run-1: no run here \(config.json is missing\)"):
        run_anywhere.read_config(Config)


def test_a_broken_configuration_is_named(run_anywhere: RunDirectory) -> None:
    files.write_atomic(run_anywhere.path("config.json"), b'{"seed": ')
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        run_anywhere.read_config(Config)
