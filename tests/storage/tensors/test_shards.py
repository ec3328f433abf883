"""Tensors that some ranks have cut in one way and others read in another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.files import FileRef, join
from storage.run_directory import RunDirectory
from storage.tensors.checkpoints import Slice, read_shards, write_shard
from tests.bench.refusals import check_sentence

SHAPES = {"scalar": (), "row": (5,), "one": (1, 4), "matrix": (7, 3), "cube": (4, 2, 3)}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def share(rank: int, ranks: int) -> dict[str, Slice]:
    places = {name: Slice.rows(shape, rank, ranks) for name, shape in SHAPES.items()}
    return {
        name: place for name, place in places.items() if 0 not in place.size and (place.shape or not rank)
    }


def write(folder: str, ranks: int, whole: dict[str, torch.Tensor]) -> list[FileRef]:
    return [
        write_shard(
            join(folder, f"shard-{rank + 1}-of-{ranks}.safetensors"),
            {name: (place, whole[name][place.box]) for name, place in share(rank, ranks).items()},
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("written_by", [1, 2, 3])
@pytest.mark.parametrize("read_by", [1, 2, 4])
def test_what_some_ranks_have_written_others_read_bit_for_bit(
    run_anywhere: RunDirectory, written_by: int, read_by: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        whole = tensors(dtype)
        shards = write(run_anywhere.uri, written_by, whole)
        for rank in range(read_by):
            wanted = share(rank, read_by)
            found = read_shards(run_anywhere.uri, shards, wanted)
            assert found.keys() == wanted.keys()
            for name, place in wanted.items():
                assert found[name].dtype == dtype and torch.equal(found[name], whole[name][place.box])


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_boxes_are_cut_and_joined_along_every_dimension(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("shards"))
    shape = (4, 5)
    whole = torch.arange(20).reshape(shape)
    row = data.draw(st.integers(1, 3))
    column = data.draw(st.integers(1, 4))
    boxes = [
        Slice(shape, (top, left), (bottom - top, right - left))
        for top, bottom in ((0, row), (row, 4))
        for left, right in ((0, column), (column, 5))
    ]
    shards = [
        write_shard(join(folder, f"{number}.safetensors"), {"w": (box, whole[box.box])})
        for number, box in enumerate(data.draw(st.permutations(boxes)))
    ]
    top = data.draw(st.integers(0, 3))
    left = data.draw(st.integers(0, 4))
    size = data.draw(st.integers(1, 4 - top)), data.draw(st.integers(1, 5 - left))
    wanted = Slice(shape, (top, left), size)
    assert torch.equal(read_shards(folder, shards, {"w": wanted})["w"], whole[wanted.box])


def test_a_rank_reads_only_the_shards_that_have_a_part_of_its_own(run_anywhere: RunDirectory) -> None:
    whole = {"w": torch.arange(12.0).reshape(6, 2)}
    shards = []
    for rank in range(3):
        place = Slice.rows((6, 2), rank, 3)
        uri = run_anywhere.path(f"{rank}.safetensors")
        shards.append(write_shard(uri, {"w": (place, whole["w"][place.box])}))
    # the last one holds something else than was written, and nobody looks
    shards[2] = FileRef(shards[2].uri, shards[2].bytes, "0" * 64)
    first = Slice((6, 2), (0, 0), (4, 2))
    assert torch.equal(read_shards(run_anywhere.uri, shards, {"w": first})["w"], whole["w"][:4])
    with pytest.raises(ValueError, match=r"2\.safetensors: the content differs"):
        read_shards(run_anywhere.uri, shards, {"w": Slice.whole((6, 2))})


def test_what_no_shard_holds_or_is_of_another_shape_is_named(run_anywhere: RunDirectory) -> None:
    shards = write(run_anywhere.uri, 2, tensors())
    for wanted, found, *words in (
        ({"other": Slice.whole((2,))}, shards, run_anywhere.uri, "'other'"),
        ({"matrix": Slice.whole(SHAPES["matrix"])}, shards[:1], run_anywhere.uri, "'matrix'"),
        ({"matrix": Slice.whole((3, 7))}, shards, "shard-1-of-2.safetensors", "[7, 3]; expected [3, 7]"),
    ):
        with pytest.raises(ValueError) as refused:
            read_shards(run_anywhere.uri, found, wanted)
        check_sentence(str(refused.value), *words)


def test_torch_reads_the_shards_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.mktemp("shards"))
    whole = {"w": torch.randn(7, 3), "v": torch.randn(5)}
    for rank in range(2):
        places = {name: Slice.rows(tuple(t.shape), rank, 2) for name, t in whole.items()}
        slices = {name: (place, whole[name][place.box]) for name, place in places.items()}
        write_shard(join(folder, f"shard-{rank + 1}-of-2.safetensors"), slices)
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
