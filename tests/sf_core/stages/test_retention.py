"""`sf ls` and `sf gc`: what is shown, what is deleted, and what stays whatever the options."""

from __future__ import annotations

import hashlib
import shutil
import socket
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.reports import states
from sf_core.reports.states import dataplane_state
from sf_core.reports.view import RunView
from sf_core.stages import retention
from sf_core.stages.retention import (
    RetentionLimits,
    find_removable,
    find_removable_checkpoints,
    find_removable_weights,
)
from storage import files
from storage.media import ImageSpan, media_file, store_image
from storage.run_directory import STAGES, Attempt, RunDirectory
from storage.tables.trajectories import write_trajectories
from tests import bench
from tests.bench import runs
from tests.bench.commands import sf


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def make(
    root: Path, name: str, iterations: int, *, url: str | None = None, host: str | None = None
) -> RunDirectory:
    """A run of four iterations whose attempt alone names its data plane."""
    run = RunDirectory(str(root / name))
    runs.configure(run, train={"iterations": 4})
    run.begin_attempt(Attempt(dataplane=url, host=host))
    runs.pretend(run, iterations, finished=iterations == 4)
    return run


def names(run: RunDirectory, **keep: int | bool) -> list[str]:
    return [spare.name for spare in find_removable(run, RetentionLimits(**keep))]  # type: ignore[arg-type]


def test_old_checkpoints_and_weights_go_and_the_newest_stay(root: Path) -> None:
    run = make(root, "a", 3)
    old = ["checkpoints/00001", "checkpoints/00002", "weights/v00001", "weights/v00002"]
    assert names(run) == old
    assert names(run, checkpoints=2, weights=3) == ["checkpoints/00001"]
    assert names(run, checkpoints=9, weights=9) == []


def test_some_checkpoints_stay_for_good(root: Path) -> None:
    run = make(root, "a", 4)
    runs.configure(run, train={"iterations": 4, "keep_every": 2})
    assert names(run, weights=9) == ["checkpoints/00001", "checkpoints/00003"]
    files.remove(run.checkpoint_dir(2) + "/state.json")
    assert names(run, weights=9) == [f"checkpoints/0000{version}" for version in (1, 2, 3)]


def test_versions_stay_that_steps_to_come_are_measured_by(root: Path) -> None:
    run = make(root, "a", 3)
    loss = {"kl": {"coefficient": 1.0, "renew_every": 2}}
    runs.configure(run, train={"iterations": 4, "loss": loss})
    # of the steps after checkpoint 3 the first is measured by version 2
    assert names(run) == ["checkpoints/00001", "checkpoints/00002", "weights/v00001"]
    # and that after checkpoint 1 by version 0, which is the start folder
    assert names(run, checkpoints=9, weights=1) == ["weights/v00001"]


@pytest.mark.parametrize(("keep", "gone"), [(1, [1, 2]), (2, [1]), (3, []), (9, [])])
def test_a_run_itself_removes_old_checkpoints_while_it_trains(root: Path, keep: int, gone: list[int]) -> None:
    with bench.reports.cleanup.served(root, "a") as (url, _):
        run = make(root, "a", 4, url=url)
        config = runs.configure(run, train={"keep_checkpoints": keep}).train
        # the one of version 4 may be written again: its step is not committed
        spares = find_removable_checkpoints(run, 3, config)
        assert [spare.uri for spare in spares] == [run.checkpoint_dir(version) for version in gone]


@pytest.mark.parametrize(("keep", "gone"), [(None, []), (1, [1]), (2, []), (9, [])])
def test_a_run_itself_removes_old_versions_while_it_goes_on(
    root: Path, keep: int | None, gone: list[int]
) -> None:
    run = make(root, "a", 3)
    config = runs.configure(run, train={"keep_weights": keep})
    # version 3 is being published
    assert [spare.uri for spare in find_removable_weights(run, 2, config)] == [
        run.weights_dir(v) for v in gone
    ]


def test_of_large_versions_the_newest_and_every_tenth_stay(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(root, "a", 13)
    config = runs.configure(run)
    assert find_removable_weights(run, 12, config) == []
    monkeypatch.setattr(retention, "SMALL_BYTES", 1)
    gone = {spare.uri for spare in find_removable_weights(run, 12, config)}
    assert gone == {run.weights_dir(version) for version in range(1, 11) if version != 10}


@settings(max_examples=bench.properties.examples(30))
@given(
    keep=st.integers(1, 4),
    every=st.integers(1, 12),
    renew=st.none() | st.integers(1, 6),
    evaluated=st.sets(st.integers(0, 14), max_size=3),
    apart=st.sets(st.integers(0, 14), max_size=2),
    held=st.sets(st.integers(0, 14), max_size=3),
    interrupted=st.integers(0, 40),
)
def test_a_run_never_removes_a_version_that_something_names(
    keep: int,
    every: int,
    renew: int | None,
    evaluated: set[int],
    apart: set[int],
    held: set[int],
    interrupted: int,
) -> None:
    folder = f"memory://kept-{uuid.uuid4().hex}"
    run = RunDirectory(f"{folder}/r")
    train: dict[str, object] = {"keep_weights": keep, "iterations": 14}
    if renew is not None:
        train["loss"] = {"kl": {"coefficient": 1.0, "renew_every": renew}}
    config = runs.configure(run, train=train, evaluate={"every": every})
    files.write_atomic(f"{run.start_dir}/config.json", b"{}")
    named = evaluated | apart | held | set(range(0, 15, 10)) | set(range(0, 15, every))
    kl = config.train.loss.kl
    for version in range(1, 15):
        runs.pretend(run, version, first=version - 1, finished=False)
        if version in evaluated:
            runs.commit(run, version, "evaluate")
        if version in apart:
            files.write_atomic(f"{run.measured_dir}/v{version:05d}-0a1b2c3d/config.json", b"{}")
        for spare in find_removable_weights(run, version - 1, config, {v for v in held if v <= version}):
            # a process that is killed has removed some of the files
            if interrupted == version:
                files.remove(f"{spare.uri}/model.safetensors")
                files.write_atomic(f"{spare.uri}/model-00001-of-00002.safetensors", b"w")
            else:
                spare.remove()
        kept = set(RunView(run).list_stored_versions())
        newest = set(range(max(1, version - keep), version + 1))
        reference = set() if kl is None else {kl.version(step) for step in range(version)}
        assert newest | {v for v in named | reference if v <= version} <= kept
    assert run.list_versions("weights") == [v for v in sorted(kept) if v] or interrupted == 14
    files.remove_folder(folder)


def test_what_changed_in_a_version_goes_with_it(root: Path) -> None:
    run = make(root, "a", 3)
    for version in (1, 2, 3):
        files.write_atomic(f"{run.weights_dir(version)}/delta.safetensors", b"d" * 10)
    sizes = {spare.name: spare.bytes for spare in find_removable(run, RetentionLimits(checkpoints=9))}
    assert sizes == {"weights/v00001": 110, "weights/v00002": 110}
    for spare in find_removable(run, RetentionLimits(checkpoints=9)):
        spare.remove()
    assert [uri.rsplit("/", 1)[1] for uri in files.list_folders(run.path("weights"))] == ["v00003"]
    # one whose base is gone is of no use to a newcomer, and in nobody's way
    assert files.exists(f"{run.weights_dir(3)}/delta.safetensors") and names(run, checkpoints=9) == []


def test_what_a_resume_needs_stays_also_behind_newer_files(root: Path) -> None:
    run = make(root, "a", 4)
    for stage in ("train", "publish"):
        files.remove(run.manifest_file(2, stage))
    # iteration 2 is trained again: from checkpoint 2, with the weights of version 2 published
    assert names(run) == ["checkpoints/00001", "weights/v00001"]


def test_a_trained_version_that_is_not_published_stays(root: Path) -> None:
    run = make(root, "a", 3)
    files.remove(run.manifest_file(2, "publish"))
    assert names(run) == ["checkpoints/00001", "checkpoints/00002", "weights/v00001"]


def test_an_incomplete_checkpoint_counts_as_none(root: Path) -> None:
    run = make(root, "a", 3)
    files.remove(run.checkpoint_dir(3) + "/state.json")
    assert names(run, weights=9) == ["checkpoints/00001"]
    for version in (1, 2):
        files.remove(run.checkpoint_dir(version) + "/state.json")
    assert names(run, weights=9) == []


def test_what_killed_writers_left_goes(root: Path) -> None:
    run = make(root, "a", 3)
    name = f".model.safetensors.{'a' * 32}.tmp"
    folders = (run.weights_dir(1), run.weights_dir(3), run.checkpoint_dir(4), run.partition("opened", 3))
    for folder in (*folders, run.uri):
        files.write_atomic(f"{folder}/{name}", b"half")
    with files.writer(run.partition("opened", 3) + "/x.parquet"):
        bench.ages.age(run.uri)
        found = names(run)
    # that of version 1 goes with its folder, and that of a writer which is alive stays
    assert found[4:] == [
        name,
        f"checkpoints/00004/{name}",
        f"opened/iteration=3/{name}",
        f"weights/v00003/{name}",
    ]
    assert "removed 8 items" in sf("gc", run.uri, "--yes")[1]
    assert names(run) == []


def test_a_measurement_that_was_interrupted_goes_and_one_with_a_result_stays(root: Path) -> None:
    run = make(root, "r", 4)
    for name in ("v00004-aaaaaaaa", "v00003-bbbbbbbb"):
        measured = RunDirectory(run.path(f"measured/{name}"))
        runs.configure(measured)
        files.write_atomic(f"{measured.start_dir}/model.safetensors", b"weights")
    runs.commit(measured, 0, "evaluate", data={"reward_mean": 0.5})
    assert names(run, checkpoints=9, weights=9) == ["measured/v00004-aaaaaaaa"]
    with bench.reports.cleanup.served(root / "r" / "measured", "v00004-aaaaaaaa") as (url, _):
        RunDirectory(run.path("measured/v00004-aaaaaaaa")).begin_attempt(Attempt(dataplane=url))
        assert names(run, checkpoints=9, weights=9) == []


@pytest.mark.parametrize("linked", ["checkpoints", "checkpoints/00001"])
def test_what_a_link_out_of_the_run_leads_to_stays(root: Path, linked: str) -> None:
    run = make(root, "a", 3)
    elsewhere = root.parent / "elsewhere"
    Path(run.path(linked)).rename(elsewhere)
    Path(run.path(linked)).symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    assert not [name for name in names(run) if name.startswith(linked)]
    assert sf("gc", run.uri, "--yes")[0] == 0
    assert sorted(elsewhere.rglob("*")) == before and Path(run.path(linked)).is_symlink()


def test_a_run_that_is_only_linked_is_listed_and_cleaned_where_it_is_named(root: Path) -> None:
    run = make(root.parent / "disk", "a", 3)
    make(root, "b", 3)
    (root / "a").symlink_to(run.uri)
    assert "a stopped 3/4" in sf("ls", str(root))[1]
    code, output = sf("gc", str(root), "--yes")
    assert code == 0 and f"skipped: {root / 'a'} is a link to a run in another folder" in output
    assert "removed 4 items" in output and len(names(run)) == 4
    assert "removed 4 items" in sf("gc", str(root / "a"), "--yes")[1]
    assert names(run) == []


def test_the_journal_goes_only_from_a_finished_run(root: Path) -> None:
    assert "journal" not in names(make(root, "a", 3), journals=False)
    finished = make(root, "b", 4)
    assert "journal" in names(finished, journals=False)
    assert "journal" not in names(finished)


def test_images_that_nobody_was_shown_go_from_a_finished_run(root: Path) -> None:
    going = make(root, "a", 3)
    finished = make(root, "b", 4)
    for run in (going, finished):
        seen = store_image(run.media_dir, b"seen")
        _ = store_image(run.media_dir, b"unseen")
        row = bench.reports.tables.trajectory(
            "s", [-1, -1, 0], images=[ImageSpan(seen, 0, 2, 28, 56)], turns=[]
        )
        write_trajectories(run, 7, [row], "part", "evaluations", is_multimodal=True)
    unseen = hashlib.sha256(b"unseen").hexdigest()
    assert not any("media" in name for name in names(going))
    assert [name for name in names(finished) if "media" in name] == [f"media/{unseen}.png"]
    sf("gc", str(root / "b"), "--yes")
    assert files.list_files(finished.media_dir) == [media_file(finished.media_dir, seen)]


def test_images_of_a_run_that_a_data_plane_knows_stay(root: Path) -> None:
    finished = make(root, "a", 4)
    store_image(finished.media_dir, b"unseen")
    with bench.reports.cleanup.served(root, "a") as (url, _):
        finished.begin_attempt(Attempt(dataplane=url, host=socket.gethostname()))
        assert not any("media" in name for name in names(finished))


def test_nothing_is_removed_without_yes(root: Path) -> None:
    run = make(root, "a", 4)
    code, output = sf("gc", run.uri)
    assert code == 0
    assert "a checkpoints/00001 to 00003 (3 items) 0.0 MB" in output
    assert output.endswith("would remove 6 items, 0.0 MB; nothing is removed without --yes")
    assert len(names(run)) == 6
    code, output = sf("gc", run.uri, "--yes", "--journals")
    assert (code, output.endswith("removed 7 items, 0.0 MB")) == (0, True)
    assert names(run, journals=False) == []
    left = {path.relative_to(run.uri).as_posix() for path in Path(run.uri).rglob("*") if path.is_file()}
    assert {name for name in left if name.startswith(("weights", "checkpoints", "journal"))} == {
        "weights/v00004/model.safetensors",
        "checkpoints/00004/model.safetensors",
        "checkpoints/00004/optimizer.safetensors",
        "checkpoints/00004/state.json",
    }
    assert sf("gc", run.uri)[1] == "would remove 0 items, 0.0 MB"


def test_object_stores_are_cleaned_too(tmp_path: Path) -> None:
    run = RunDirectory("memory://cleanup/runs/a")
    runs.configure(run, train={"iterations": 4})
    runs.pretend(run, 3)
    assert sf("gc", "memory://cleanup/runs", "--yes")[0] == 0
    assert names(run) == []
    assert files.exists(run.weights_dir(3) + "/model.safetensors")
    files.remove_folder("memory://cleanup")


def test_a_run_that_is_worked_on_is_refused_and_left_alone_among_others(root: Path) -> None:
    with bench.reports.cleanup.served(root, "busy") as (url, http):
        busy = make(root, "busy", 3, url=url)
        idle = make(root, "idle", 3)
        code, output = sf("gc", busy.uri, "--yes")
        assert (code, output) == (2, "error: busy: the run is in use; stop it or wait until it ends")
        code, output = sf("gc", str(root), "--yes")
        assert code == 0 and "skipped: busy: the run is in use" in output
        assert names(idle) == []
        assert "busy running 3/4" in sf("ls", str(root))[1]
        http.post("/runs/busy/release", json={})
        assert len(names(busy)) == 4
    assert "busy stopped 3/4" in sf("ls", str(root))[1]


def test_a_run_without_an_attempt_is_nobodys(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench.reports.cleanup.served(root, "busy") as (url, _):
        run = make(root, "busy", 3)
        runs.configure(run, train={"iterations": 4}, dataplane={"url": url})
        monkeypatch.setenv("SF_DATAPLANE_URL", url)
        assert dataplane_state(run) == "absent"


def test_a_copy_of_a_run_that_is_worked_on_is_nobodys(root: Path) -> None:
    with bench.reports.cleanup.served(root, "busy") as (url, _):
        busy = make(root, "busy", 3, url=url)
        shutil.copytree(busy.uri, root.parent / "copy" / "busy")
        copy = RunDirectory(str(root.parent / "copy" / "busy"))
        assert (dataplane_state(busy), dataplane_state(copy)) == ("running", "absent")
        linked = root.parent / "linked"
        linked.symlink_to(root)
        assert dataplane_state(RunDirectory(str(linked / "busy"))) == "running"


def test_a_journal_that_a_data_plane_has_open_stays(root: Path) -> None:
    with bench.reports.cleanup.served(root, "a") as (url, http):
        run = make(root, "a", 4, url=url)
        http.post("/runs/a/release", json={})
        assert "journal" not in names(run, journals=False)


def test_a_data_plane_that_wants_another_key_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SF_DATAPLANE_KEY", "wrong")
    with bench.reports.cleanup.served(root, "a", key="right") as (url, _):
        run = make(root, "a", 3, url=url)
        code, output = sf("gc", run.uri)
        assert "a unknown 3/4" in sf("ls", run.uri)[1]
    assert code == 2
    assert (
        f"its data plane at {url} refused the key" in output
        and f"Set SF_DATAPLANE_KEY to the key of the data plane at {url}" in output
    )


def test_on_loopback_of_another_machine_a_data_plane_cannot_be_asked(root: Path) -> None:
    run = make(root, "a", 3, url="http://127.0.0.1:1", host="elsewhere")
    make(root, "b", 4, url="http://127.0.0.1:1", host="elsewhere")
    make(root, "c", 3, url="http://127.0.0.1:1", host=socket.gethostname())
    shown = sf("ls", str(root))[1]
    assert all(line in shown for line in ("a unknown 3/4", "b finished 4/4", "c stopped 3/4"))
    code, output = sf("gc", run.uri)
    attempt = run.path("attempts", "00001")
    sentence = (
        "error: a: it is unknown if the run is in use: its data plane at http://127.0.0.1:1 is on "
        "elsewhere; run the command there, or if this data plane is gone for good, write "
        f'{{"dataplane": ""}} into {attempt}'
    )
    assert (code, output) == (2, sentence)
    code, output = sf("gc", str(root))
    assert (code, "skipped: a: it is unknown" in output) == (0, True)
    assert "b checkpoints/00001" in output and "c checkpoints/00001" in output
    Path(attempt).write_text('{"dataplane": ""}', encoding="utf-8")
    assert "a stopped 3/4" in sf("ls", run.uri)[1]
    assert len(names(run)) == 4


def test_a_data_plane_that_does_not_answer_in_time_cannot_be_asked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "STATUS_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as stalled:
        run = make(root, "a", 3, url=f"http://127.0.0.1:{stalled.getsockname()[1]}")
        assert "a unknown 3/4" in sf("ls", run.uri)[1]
        code, output = sf("gc", run.uri, "--yes")
    assert (code, "cannot be reached (timed out); try again" in output) == (2, True)
    # nobody listens there any more
    assert "a stopped 3/4" in sf("ls", run.uri)[1]


def test_before_anything_is_removed_data_planes_that_are_away_may_come_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "RESTART_S", 0.05)
    url = "http://127.0.0.1:1"
    run = make(root, "a", 3, url=url)
    assert "may be restarting" not in sf("gc", run.uri)[1]
    code, output = sf("gc", run.uri, "--yes")
    assert code == 0
    assert output.startswith("a: the data plane does not answer and may be restarting; waiting for 0 s")
    assert output.endswith("removed 4 items, 0.0 MB")
    assert "may be restarting" not in sf("gc", make(root, "b", 4, url=url).uri, "--yes", "--journals")[1]


def test_a_run_that_was_given_more_iterations_is_finished_when_they_are_summed_up(root: Path) -> None:
    run = make(root, "a", 4)
    runs.configure(run, train={"iterations": 5})
    assert "a stopped 4/5" in sf("ls", run.uri)[1]
    for stage in STAGES:
        runs.commit(run, 4, stage)
    assert "a stopped 5/5" in sf("ls", run.uri)[1]
    assert "journal" not in names(run, journals=False)
    run.write_summary({"iterations": 5})
    assert "a finished 5/5" in sf("ls", run.uri)[1]
    assert "journal" in names(run, journals=False)
    files.write_atomic(run.path("summary.json"), b"{")
    assert "summary.json: cannot be read" in sf("ls", run.uri)[1]


def test_the_list_shows_state_iterations_rewards_and_size(root: Path) -> None:
    make(root, "a", 4)
    stopped = make(root, "b", 2)
    runs.commit(stopped, 1, "evaluate", data={"reward_mean": 0.75})
    files.write_atomic(str(root / "broken" / "config.json"), b"{")
    files.write_atomic(str(root / "other" / "file"), b"x" * 2_000_000)
    code, output = sf("ls", str(root))
    assert code == 0
    assert "a finished 4/4 0.300 - 0.0 MB b stopped 2/4 0.100 0.750 0.0 MB" in output
    assert "broken unreadable 0/? - - 0.0 MB" in output
    assert "other" not in output
    assert "a finished 4/4" in sf("ls", str(root / "a"))[1]


def test_a_run_that_cannot_be_read_is_named_and_hides_no_other(root: Path) -> None:
    other = make(root, "other", 3)
    run = make(root, "run", 3)
    shutil.copytree(run.uri, root / "copy")
    fault = f"{root / 'copy'}/manifests/00002/publish.json: manifest is for run_id 'run', expected 'copy'"
    fault += "; name the folder of the run run again"
    code, output = sf("ls", str(root))
    assert code == 0
    assert "copy unreadable 0/? - - 0.0 MB other stopped 3/4" in output
    assert f"cannot be read: {fault}" in output
    assert sf("ls", str(root / "copy")) == (2, f"error: {fault}")
    code, output = sf("gc", str(root), "--yes")
    assert code == 0 and f"skipped: {root / 'copy'}/manifests/00000/" in output
    assert names(other) == names(run) == []
    assert sf("gc", str(root / "copy"), "--yes")[0] == 2


def test_a_summary_that_makes_no_sense_hides_no_other_run(root: Path) -> None:
    make(root, "a", 4).write_summary({"iterations": None})
    make(root, "b", 3)
    fault = f"{root / 'a'}/summary.json: the field iterations must be an integer, got None"
    code, output = sf("ls", str(root))
    assert code == 0
    assert "a unreadable 0/? - - 0.0 MB b stopped 3/4" in output
    assert f"cannot be read: {fault}" in output
    code, output = sf("gc", str(root))
    assert code == 0 and f"skipped: {fault}" in output
