import pytest
import torch
from safetensors import safe_open

from storage import files
from storage.run_directory import RunDirectory
from storage.weights import load_weights, save_weights


def test_weights_come_back_bit_for_bit(run: RunDirectory) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(4, 3).T, "half": torch.randn(2).bfloat16()}
    ref = save_weights(run.weights_dir(3), tensors, 3)
    assert ref.uri == run.path("weights/v00003/model.safetensors")
    loaded = load_weights(run.weights_dir(3))
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_tied_weights_are_stored_once_and_come_back_under_both_names(run: RunDirectory) -> None:
    embedding = torch.randn(8, 4)
    tied = save_weights(run.weights_dir(1), {"embed": embedding, "head": embedding}, 1)
    alone = save_weights(run.weights_dir(2), {"embed": embedding}, 2)
    assert tied.bytes < alone.bytes + embedding.nbytes
    loaded = load_weights(run.weights_dir(1))
    assert loaded["head"] is loaded["embed"]
    assert torch.equal(loaded["head"], embedding)


def test_equal_tensors_give_equal_bytes(run: RunDirectory) -> None:
    tensors = {"embed": torch.randn(8, 4), "a": torch.randn(3).half()}
    tensors |= {f"tied{i}": tensors["embed"] for i in range(5)}
    refs = [save_weights(run.weights_dir(version), tensors, 1) for version in range(4)]
    assert len({ref.sha256 for ref in refs}) == 1


def test_the_file_names_its_version(run: RunDirectory) -> None:
    ref = save_weights(run.weights_dir(7), {"a": torch.zeros(1)}, 7)
    with files.local_copy(ref.uri) as path, safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "version": "7"}


def test_missing_and_truncated_weights_are_named(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match=r"v00001/model\.safetensors: no such file"):
        load_weights(run.weights_dir(1))
    uri = save_weights(run.weights_dir(1), {"a": torch.zeros(100)}, 1).uri
    files.write_atomic(uri, files.read_bytes(uri)[:200])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_weights(run.weights_dir(1))


def test_a_folder_split_into_several_files_is_read_as_one(run: RunDirectory) -> None:
    from storage.weights import write_tensors

    for name in ("a", "b"):
        write_tensors(run.path("start", f"{name}.safetensors"), {name: torch.ones(2)}, {})
    index = b'{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}'
    files.write_atomic(run.path("start", "model.safetensors.index.json"), index)
    assert sorted(load_weights(run.start_dir)) == ["a", "b"]
