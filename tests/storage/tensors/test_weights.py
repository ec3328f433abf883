from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from sf_core.config import PolicyConfig
from sf_core.models.builtin import make_policy
from storage import files
from storage.run_directory import RunDirectory
from storage.tensors import weights
from storage.tensors.tensor_bytes import TensorBytes, parse
from storage.tensors.weights import (
    DIGEST,
    has_weights,
    load_weights,
    open_weights,
    remove_weights,
    save_adapter,
    save_weights,
)


def test_weights_come_back_bit_for_bit(run_anywhere: RunDirectory) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(4, 3).T, "half": torch.randn(2).bfloat16()}
    [ref] = save_weights(run_anywhere.weights_dir(3), tensors, 3)
    assert ref.uri == run_anywhere.path("weights/v00003/model.safetensors")
    loaded = load_weights(run_anywhere.weights_dir(3))
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_tied_weights_are_stored_once_and_come_back_under_both_names(run_anywhere: RunDirectory) -> None:
    embedding = torch.randn(8, 4)
    [tied] = save_weights(run_anywhere.weights_dir(1), {"embed": embedding, "head": embedding}, 1)
    [alone] = save_weights(run_anywhere.weights_dir(2), {"embed": embedding}, 2)
    assert tied.bytes < alone.bytes + embedding.nbytes
    loaded = load_weights(run_anywhere.weights_dir(1))
    assert loaded["head"] is loaded["embed"]
    assert torch.equal(loaded["head"], embedding)


def test_equal_tensors_give_equal_bytes(run_anywhere: RunDirectory) -> None:
    tensors = {"embed": torch.randn(8, 4), "a": torch.randn(3).half()}
    tensors |= {f"tied{i}": tensors["embed"] for i in range(5)}
    refs = [
        ref for version in range(4) for ref in save_weights(run_anywhere.weights_dir(version), tensors, 1)
    ]
    assert len({ref.sha256 for ref in refs}) == 1


def test_the_file_names_its_version_and_what_it_holds(run_anywhere: RunDirectory) -> None:
    def metadata(version: int, **tensors: torch.Tensor) -> dict[str, str]:
        [ref] = save_weights(run_anywhere.weights_dir(version), tensors, version)
        with files.local_copy(ref.uri) as path, safe_open(path, "pt") as file:
            return file.metadata()

    same = {"a": torch.zeros(2), "b": torch.ones(2).half()}
    first = metadata(7, **same)
    again = metadata(8, **dict(reversed(same.items())))
    assert (first.pop("version"), again.pop("version")) == ("7", "8")
    assert first == again == {"format": "pt", "digest": first["digest"]}
    others = ({"a": torch.zeros(2)}, same | {"a": torch.zeros(2, 1)}, same | {"a": torch.tensor([0.0, -0.0])})
    assert len({metadata(9, **other)["digest"] for other in others} | {first["digest"]}) == 4


def test_an_adapter_is_weights_of_its_folder(run_anywhere: RunDirectory) -> None:
    folder = run_anywhere.weights_dir(2)
    factors = {"a": torch.randn(2, 3), "b": torch.randn(3, 2)}
    weights_ref, config_ref = save_adapter(folder, factors, b'{"r": 2}', 2, "bfloat16")
    assert weights_ref.uri == files.join(folder, "adapter_model.safetensors")
    assert files.read_bytes(config_ref.uri) == b'{"r": 2}'
    assert has_weights(folder)
    loaded = load_weights(folder)
    assert all(torch.equal(loaded[name], tensor.bfloat16()) for name, tensor in factors.items())
    header, _ = open_weights(folder)
    assert header.metadata["version"] == "2" and DIGEST in header.metadata
    remove_weights(folder)
    assert not has_weights(folder) and not files.exists(config_ref.uri)


def test_version_0_is_the_adapter_of_a_run_that_has_one(run_anywhere: RunDirectory) -> None:
    assert run_anywhere.version_dir(0) == run_anywhere.start_dir
    save_adapter(run_anywhere.start_adapter_dir, {"a": torch.zeros(1, 1)}, b"{}", 0)
    assert run_anywhere.version_dir(0) == run_anywhere.start_adapter_dir
    assert run_anywhere.version_dir(1) == run_anywhere.weights_dir(1)


def test_missing_and_truncated_weights_are_named(run_anywhere: RunDirectory) -> None:
    with pytest.raises(ValueError, match=r"v00001/model\.safetensors: no such file"):
        load_weights(run_anywhere.weights_dir(1))
    uri = save_weights(run_anywhere.weights_dir(1), {"a": torch.zeros(100)}, 1)[0].uri
    files.write_atomic(uri, files.read_bytes(uri)[:200])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_weights(run_anywhere.weights_dir(1))


def test_a_folder_split_into_several_files_is_read_as_one(run_anywhere: RunDirectory) -> None:
    for name in ("a", "b"):
        files.write_atomic(run_anywhere.path("start", f"{name}.safetensors"), save({name: torch.ones(2)}))
    index = b'{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}'
    files.write_atomic(run_anywhere.path("start", "model.safetensors.index.json"), index)
    assert sorted(load_weights(run_anywhere.start_dir)) == ["a", "b"]


def test_files_are_those_of_the_safetensors_library(run_anywhere: RunDirectory) -> None:
    dtypes = (
        torch.int64,
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.uint8,
        torch.bool,
    )
    tensors = {f"{i % 3}{i}": torch.ones(i + 1, 2).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"a": torch.randn(5, 3).T, "b": torch.randn(()), "none": torch.empty(0, 4)}
    [ref] = save_weights(run_anywhere.weights_dir(1), tensors, 1)
    ours = parse(ref.uri, files.read_bytes(ref.uri))
    theirs = parse("theirs", save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    assert list(ours.header.entries.items()) == list(theirs.header.entries.items())
    assert ours.data == theirs.data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_weights_are_stored_in_several_files_with_an_index(
    run_anywhere: RunDirectory, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    tensors = {f"layer.{number:02d}": torch.randn(10, 10) for number in range(7)}
    tensors |= {"large": torch.randn(100, 10), "ids": torch.arange(5), "tied": tensors["layer.03"]}
    [whole] = save_weights(run_anywhere.weights_dir(1), tensors, 1, dtype)
    monkeypatch.setattr(weights, "FILE_BYTES", 1000)
    index, *refs = save_weights(run_anywhere.weights_dir(2), tensors, 1, dtype)
    assert index.uri.endswith("v00002/model.safetensors.index.json")
    assert files.list_files(run_anywhere.weights_dir(2)) == sorted(ref.uri for ref in (index, *refs))
    sizes = [parse(ref.uri, files.read_bytes(ref.uri)).header.data_bytes for ref in refs]
    assert len(sizes) > 2 and sorted(sizes)[-2] <= 1000 < max(sizes)

    found = load_weights(run_anywhere.weights_dir(2))
    expected = load_weights(run_anywhere.weights_dir(1))
    assert found.keys() == expected.keys() == tensors.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    header, pieces = open_weights(run_anywhere.weights_dir(2))
    joined = TensorBytes("joined", header, b"".join(pieces))
    digest = parse(whole.uri, files.read_bytes(whole.uri)).header.metadata[DIGEST]
    assert joined.digest() == header.metadata[DIGEST] == digest
    assert header.metadata["tied"] == "layer.03" and header.metadata["version"] == "1"


def test_weights_in_one_file_take_the_place_of_those_in_several_and_back(
    run_anywhere: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_anywhere.weights_dir(1)
    for value, size in ((1.0, 100), (2.0, 10_000), (3.0, 100)):
        monkeypatch.setattr(weights, "FILE_BYTES", size)
        save_weights(folder, {name: torch.full((20,), value) for name in "abc"}, 1)
        assert all(tensor[0] == value for tensor in load_weights(folder).values())
        header, pieces = open_weights(folder)
        assert TensorBytes("found", header, b"".join(pieces)).digest() == header.metadata[DIGEST]


def test_transformers_reads_weights_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_policy(str(tmp_path), PolicyConfig(hidden_size=32, num_layers=2), seed=0)
    expected = load_weights(str(tmp_path))
    monkeypatch.setattr(weights, "FILE_BYTES", 20_000)
    assert len(save_weights(str(tmp_path), expected, 1)) > 3
    assert not (tmp_path / "model.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path)).state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.items())


def test_a_tensor_that_is_in_two_files_is_named(run_anywhere: RunDirectory) -> None:
    for name in "ab":
        files.write_atomic(run_anywhere.path("start", f"{name}.safetensors"), save({"w": torch.ones(2)}))
    index = b'{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}'
    files.write_atomic(run_anywhere.path("start", "model.safetensors.index.json"), index)
    with pytest.raises(
        ValueError,
        match=r"b\.safetensors: the file has the tensor 'w', which another file of the folder also has",
    ):
        open_weights(run_anywhere.start_dir)
