"""Files of a run directory, cut, changed and mixed up: every command that reads them refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sf_core.scheduling.timeline import read_spans
from storage.run_directory import STAGES, RunDirectory
from storage.tables import parquet
from storage.tables.batches import read_batch
from storage.tables.schema import SCHEMA
from storage.tables.trajectories import read_trajectories, to_table, write_trajectories
from storage.tensors.checkpoints import PARTS, Slice, TrainerProgress, load_checkpoint, save_shard
from storage.tensors.weights import load_weights, save_weights
from tests.bench import refusals, runs
from tests.bench.commands import check_refused

ROLLOUT = "trajectories/iteration=0/rollout-1.parquet"
WEIGHTS = "weights/v00001/model.safetensors"
CHECKPOINT = "checkpoints/00001"
SHARD = f"{CHECKPOINT}/shard-1-of-1.safetensors"
PLACE = Slice.whole((8,))
TIMELINE = "timeline/train-0.1.1000000.json"
SPAN = {"worker": "t0", "tag": "train", "start": 0.0, "end": 1.0}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one iteration."""
    torch = pytest.importorskip("torch")
    run = RunDirectory(str(tmp_path_factory.mktemp("runs") / "damaged"))
    runs.configure(run)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    times = {"started_at": 0.0, "finished_at": 1.0, "version": 1, "lags": []}
    rows = write_trajectories(run, 0, [runs.conversation(turns)], "rollout-1")
    sampled = {"groups": [0], "rejected": {}, "reward_mean": 0.5}
    runs.commit(run, 0, "rollout", outputs=[rows], data=sampled | times)
    [weights] = save_weights(run.weights_dir(1), {"w": torch.arange(64.0)}, 1)
    state = {f"{part}/w": (PLACE, torch.arange(8.0)) for part in PARTS}
    progress = TrainerProgress(version=1, optimizer_steps=1)
    save_shard(run.checkpoint_dir(1), state, 0, 1, progress, patience_s=0.0)
    for stage in STAGES[1:]:
        runs.commit(run, 0, stage, outputs=[weights] if stage == "train" else [], data=times)
    Path(run.path("timeline")).mkdir()
    Path(run.path(TIMELINE)).write_text(json.dumps([SPAN]), encoding="utf-8")
    return Path(run.uri)


@pytest.fixture
def damaged_run(pristine: Path, tmp_path: Path) -> RunDirectory:
    shutil.copytree(pristine, tmp_path / "damaged")
    return RunDirectory(str(tmp_path / "damaged"))


def check_unreadable(run: RunDirectory, read: Callable[[], object], *names: str) -> None:
    before = refusals.snapshot(Path(run.uri))
    with refusals.clear_refusal(*names):
        read()
    assert refusals.snapshot(Path(run.uri)) == before


def bytes_of(run: RunDirectory, name: str) -> bytes:
    return Path(run.path(name)).read_bytes()


READERS: dict[str, Callable[[RunDirectory], object]] = {
    "config.json": lambda run: run.read_config(type(runs.configure(RunDirectory("memory://any")))),
    "manifests/00000/rollout.json": lambda run: run.read_manifest(0, "rollout"),
    ROLLOUT: lambda run: read_trajectories(run.path(ROLLOUT), SCHEMA.names),
    WEIGHTS: lambda run: run.verify(_train(run)),
    f"{CHECKPOINT}/state.json": lambda run: load_checkpoint(run.path(CHECKPOINT), {"w": PLACE}),
    SHARD: lambda run: load_checkpoint(run.path(CHECKPOINT), {"w": PLACE}),
    TIMELINE: read_spans,
}
"""Readers that must notice a change of a file, by its name."""


def _train(run: RunDirectory) -> object:
    manifest = run.read_manifest(0, "train")
    assert manifest is not None
    return manifest


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_anywhere_is_named(damaged_run: RunDirectory, name: str, share: float) -> None:
    whole = bytes_of(damaged_run, name)
    Path(damaged_run.path(name)).write_bytes(whole[: int(share * len(whole))])
    try:
        check_unreadable(damaged_run, lambda: READERS[name](damaged_run), damaged_run.path(name))
    finally:
        Path(damaged_run.path(name)).write_bytes(whole)


@pytest.mark.parametrize("name", [ROLLOUT, WEIGHTS, SHARD])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.01, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_flipped_is_noticed_or_changes_nothing(
    damaged_run: RunDirectory, name: str, share: float, bit: int
) -> None:
    whole = bytes_of(damaged_run, name)
    changed = bytearray(whole)
    changed[int(share * len(whole))] ^= 1 << bit
    expected = read_trajectories(damaged_run.path(ROLLOUT), SCHEMA.names)
    Path(damaged_run.path(name)).write_bytes(changed)
    try:
        found = READERS[name](damaged_run)
    except ValueError as error:
        refusals.check_sentence(str(error), damaged_run.path(name))
    else:
        # Parquet has checksums of its pages only: of the rest, nothing that is read may differ
        assert name == ROLLOUT and expected.equals(found)
    finally:
        Path(damaged_run.path(name)).write_bytes(whole)


SOMETHING_ELSE = [b"", b"null", b"[]", b"3", b'{"a": 1}', b"\xff\xfe", b"[" * 2000, b'{"state": {}}']
JSON_FILES = [name for name in READERS if name.endswith(".json")]
# an empty list is a timeline
MIXED_UP = [pair for pair in product(JSON_FILES, SOMETHING_ELSE) if pair != (TIMELINE, b"[]")]


@pytest.mark.parametrize(("name", "text"), MIXED_UP, ids=lambda value: repr(value[:30]))
def test_a_file_with_something_else_in_it_is_named(damaged_run: RunDirectory, name: str, text: bytes) -> None:
    Path(damaged_run.path(name)).write_bytes(text)
    check_unreadable(damaged_run, lambda: READERS[name](damaged_run), damaged_run.path(name))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run_id", "other"),
        ("iteration", 3),
        ("stage", "train"),
        ("attempt", "first"),
        ("outputs", [{"uri": "x", "bytes": "many", "sha256": ""}]),
        ("outputs", [{"uri": "../../../etc/passwd", "bytes": 1, "sha256": ""}]),
        ("outputs", [{"uri": "/etc/passwd", "bytes": 1, "sha256": ""}]),
        ("outputs", [{"uri": "s3://elsewhere/x", "bytes": 1, "sha256": ""}]),
        ("outputs", {}),
        ("data", []),
        ("created_at", "yesterday"),
        ("extra", 1),
    ],
)
def test_a_manifest_that_was_edited_is_named(damaged_run: RunDirectory, key: str, value: object) -> None:
    path = Path(damaged_run.manifest_file(0, "rollout"))
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {key: value}), encoding="utf-8")
    check_unreadable(damaged_run, lambda: damaged_run.read_manifest(0, "rollout"), str(path), key)


@pytest.mark.parametrize(
    "column", ["session_id", "token_ids", "loss_mask", "logprobs", "turns", "reward", "messages"]
)
def test_a_column_of_another_type_is_named(damaged_run: RunDirectory, column: str) -> None:
    table = read_trajectories(damaged_run.path(ROLLOUT)).drop_columns(["iteration"])
    other = pa.array([[True]] if column != "loss_mask" else ["x"])
    at = table.column_names.index(column)
    parquet.write_table(damaged_run.path(ROLLOUT), table.set_column(at, column, other))
    for read in (read_trajectories, read_batch):
        check_unreadable(
            damaged_run, lambda read=read: read(damaged_run.path(ROLLOUT)), ROLLOUT, f"column {column}"
        )


@pytest.mark.parametrize("content", ["no table of ours", "other columns", "text"])
@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "{run}"],
        ["inspect", "{run}", "--session", "s0"],
        ["report", "{run}", "--output", "{run}/page.html"],
        ["export", "{run}", "{run}/out.jsonl", "--to", "trl"],
    ],
    ids=lambda command: " ".join(command[::2]),
)
def test_commands_refuse_parquet_that_is_not_theirs(
    damaged_run: RunDirectory, command: list[str], content: str
) -> None:
    folder = Path(damaged_run.uri).parent
    (folder / "run.yaml").write_text("", encoding="utf-8")
    table = pa.table({"x": [1]})
    if content == "text":
        Path(damaged_run.path(ROLLOUT)).write_text("session_id,reward\n", encoding="utf-8")
    elif content == "other columns":
        parquet.write_table(damaged_run.path(ROLLOUT), table)
    else:
        pa.parquet.write_table(table, damaged_run.path(ROLLOUT))
    check_refused(folder, [part.format(run=damaged_run.uri) for part in command], ROLLOUT)


@pytest.mark.parametrize("command", ["inspect", "report", "gc", "resume", "replay", "export", "ls"])
def test_commands_refuse_a_damaged_configuration_or_manifest(damaged_run: RunDirectory, command: str) -> None:
    more = {"replay": ["--iteration", "0"], "export": [damaged_run.path("out.jsonl"), "--to", "trl"]}.get(
        command, []
    )
    folder = Path(damaged_run.uri).parent
    for name in ("config.json", "manifests/00000/rollout.json", "manifests/00000/train.json"):
        whole = bytes_of(damaged_run, name)
        Path(damaged_run.path(name)).write_bytes(whole[:-5])
        if READS[command] >= {name}:
            check_refused(folder, [command, damaged_run.uri, *more], name)
        Path(damaged_run.path(name)).write_bytes(whole)


_ROLLOUT = "manifests/00000/rollout.json"
_TRAIN = "manifests/00000/train.json"
READS = {
    "inspect": {_ROLLOUT, _TRAIN},
    "report": {_ROLLOUT},
    "gc": {"config.json", _TRAIN},
    "resume": {"config.json"},
    "replay": {_TRAIN},
    "export": {_ROLLOUT},
    "ls": {"config.json", _ROLLOUT},
}
"""Files that a command needs."""


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        3,
        {"w": 3},
        {"w": "../other/model.safetensors"},
        {"w": "/etc/passwd"},
        {"w": "pytorch_model.bin"},
    ],
)
def test_an_index_of_weights_names_tensors_of_its_folder_only(
    damaged_run: RunDirectory, weight_map: object
) -> None:
    folder = Path(damaged_run.weights_dir(1))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map}), encoding="utf-8"
    )
    check_unreadable(
        damaged_run, lambda: load_weights(str(folder)), "model.safetensors.index.json", "weight_map"
    )


def test_a_table_of_ours_is_read_as_it_was_written(damaged_run: RunDirectory) -> None:
    # the check of types does not depend on how Parquet names the elements of lists
    assert set(SCHEMA.names) <= set(read_trajectories(damaged_run.path(ROLLOUT)).column_names)
    assert to_table("r", []).schema.equals(SCHEMA)
