from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from storage import files
from storage.run_directory import RunDirectory
from storage.tensors.checkpoints import (
    PARTS,
    Slice,
    TrainerProgress,
    has_checkpoint,
    load_checkpoint,
    remove_checkpoint,
    save_shard,
)

SHAPES = {"embed": (5, 3), "norm": (3,)}
WHOLE = {name: Slice.whole(shape) for name, shape in SHAPES.items()}
PROGRESS = TrainerProgress(version=3, optimizer_steps=6)


def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        f"{part}/{name}": torch.randn(shape, generator=random)
        for part in PARTS
        for name, shape in SHAPES.items()
    }


def save_part(
    folder: str, rank: int, ranks: int, patience_s: float = 20.0, progress: TrainerProgress = PROGRESS
) -> None:
    whole = tensors()
    places = {name: Slice.rows(tuple(tensor.shape), rank, ranks) for name, tensor in whole.items()}
    slices = {name: (place, whole[name][place.box]) for name, place in places.items()}
    save_shard(folder, slices, rank, ranks, progress, patience_s)


def save_whole(folder: str, ranks: int) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: save_part(folder, rank, ranks), range(ranks)))


def check_loads(folder: str) -> None:
    found, progress = load_checkpoint(folder, WHOLE)
    expected = tensors()
    assert progress == PROGRESS and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_base_of_an_adapter_is_stored_and_nothing_of_one_where_there_is_none(
    run_anywhere: RunDirectory,
) -> None:
    folder = run_anywhere.checkpoint_dir(3)
    of_adapter = run_anywhere.checkpoint_dir(4)
    save_whole(folder, 1)
    known = {"version", "optimizer_steps", "shards"}
    assert json.loads(files.read_bytes(f"{folder}/state.json")).keys() == known
    progress = TrainerProgress(version=4, optimizer_steps=8, base="a digest")
    save_part(of_adapter, 0, 1, progress=progress)
    assert json.loads(files.read_bytes(f"{of_adapter}/state.json")).keys() == {*known, "base"}
    assert load_checkpoint(of_adapter, WHOLE)[1] == progress


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_what_all_ranks_have_stored_is_loaded_whole(run_anywhere: RunDirectory, ranks: int) -> None:
    folder = run_anywhere.checkpoint_dir(3)
    save_whole(folder, ranks)
    check_loads(folder)


def test_state_json_names_every_shard_and_is_written_last(run_anywhere: RunDirectory) -> None:
    folder = run_anywhere.checkpoint_dir(1)
    for rank in (2, 1):
        save_part(folder, rank, 3)
        assert not has_checkpoint(folder)
    save_part(folder, 0, 3)
    assert has_checkpoint(folder)
    shards = json.loads(files.read_bytes(f"{folder}/state.json"))["shards"]
    assert list(shards) == [f"shard-{number}-of-3.safetensors" for number in (1, 2, 3)]
    for name, written in shards.items():
        found = files.describe(f"{folder}/{name}")
        assert written == {"bytes": found.bytes, "sha256": found.sha256}
    files.remove(f"{folder}/state.json")
    with pytest.raises(ValueError, match="no complete checkpoint here"):
        load_checkpoint(folder, WHOLE)


def test_a_shard_that_does_not_come_leaves_no_checkpoint(run_anywhere: RunDirectory) -> None:
    folder = run_anywhere.checkpoint_dir(1)
    save_part(folder, 2, 3)
    with pytest.raises(TimeoutError, match=r"shard-2-of-3\.json: this checkpoint was not written in time"):
        save_part(folder, 0, 3, patience_s=0.0)
    assert not has_checkpoint(folder)


def test_shards_that_are_not_named_are_not_read(run_anywhere: RunDirectory) -> None:
    folder = run_anywhere.checkpoint_dir(1)
    # left by a try with other ranks, and by nobody knows whom
    save_part(folder, 1, 4)
    files.write_atomic(f"{folder}/shard-9-of-9.safetensors", b"no tensors")
    save_whole(folder, 2)
    check_loads(folder)


@pytest.mark.parametrize("number", [1, 2])
def test_damaged_and_missing_shards_are_named(run_anywhere: RunDirectory, number: int) -> None:
    folder = run_anywhere.checkpoint_dir(1)
    save_whole(folder, 2)
    uri = f"{folder}/shard-{number}-of-2.safetensors"
    content = files.read_bytes(uri)
    for damaged, reason in (
        (content[:-1], "has .* bytes, .* were written"),
        (content[:-1] + bytes([content[-1] ^ 1]), "content differs"),
    ):
        files.write_atomic(uri, damaged)
        with pytest.raises(ValueError, match=rf"shard-{number}-of-2\.safetensors: .*{reason}"):
            load_checkpoint(folder, WHOLE)
    files.remove(uri)
    with pytest.raises(ValueError, match=rf"shard-{number}-of-2\.safetensors: is missing"):
        load_checkpoint(folder, WHOLE)


def test_a_damaged_state_file_is_named(run_anywhere: RunDirectory) -> None:
    folder = run_anywhere.checkpoint_dir(1)
    save_whole(folder, 1)
    state = json.loads(files.read_bytes(f"{folder}/state.json"))
    elsewhere = {"../00002/shard-1-of-1.safetensors": state["shards"]["shard-1-of-1.safetensors"]}
    for text in ('{"state"', '{"shards": {}}', json.dumps(state | {"shards": elsewhere})):
        files.write_atomic(f"{folder}/state.json", text.encode())
        with pytest.raises(ValueError, match=r"state\.json: no state of a checkpoint: "):
            load_checkpoint(folder, WHOLE)


def test_a_checkpoint_that_is_removed_is_none_from_the_beginning(run_anywhere: RunDirectory) -> None:
    folder = run_anywhere.checkpoint_dir(1)
    save_whole(folder, 2)
    remove_checkpoint(folder)
    assert not has_checkpoint(folder) and files.list_files(folder) == []
