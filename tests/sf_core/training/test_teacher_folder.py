"""What `train.teacher.model` names: folders, and versions of runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from sf_core.training.teacher_folder import TeacherFolder, check_vocabulary, find_teacher, is_here
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_adapter, load_weights, save_adapter, save_weights
from tests import bench
from tests.bench import runs
from tests.bench.refusals import check_sentence


def loaded(teacher: TeacherFolder) -> dict[str, torch.Tensor]:
    with teacher.open() as (folder, adapter):
        assert (
            adapter is None and Path(folder, "config.json").is_file() and not Path(folder, "adapter").exists()
        )
        return load_weights(folder)


@pytest.fixture
def taught(tmp_path: Path) -> RunDirectory:
    """A run that keeps versions 2 and 3, of which 3 has weights of its own."""
    run = bench.policy_server.publish_run(tmp_path)
    weights = {name: tensor + 1 for name, tensor in load_weights(run.start_dir).items()}
    save_weights(run.weights_dir(3), weights, 3)
    Path(run.weights_dir(3), "delta.safetensors").write_bytes(b"of no use")
    return run


def test_a_folder_is_opened_where_it_lies(small_policy: str) -> None:
    with find_teacher(small_policy).open() as opened:
        assert opened == (small_policy, None)


def test_a_version_of_a_run_is_its_weights_beside_the_files_of_the_start_folder(taught: RunDirectory) -> None:
    began = loaded(find_teacher(f"{taught.uri}@0"))
    version = loaded(find_teacher(f"{taught.uri}@3"))
    assert all(torch.equal(version[name], tensor + 1) for name, tensor in began.items())
    with find_teacher(f"{taught.uri}@3").open() as (folder, _):
        names = {path.name for path in Path(folder).iterdir()}
        assert {"tokenizer.json", "config.json", "model.safetensors"} <= names
        assert "delta.safetensors" not in names
    assert not Path(folder).exists()


def test_a_version_of_a_run_of_an_adapter_is_the_start_folder_and_the_adapter(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "lora"))
    bench.trained_runs.start(run, runs.configure(run, train={"lora": {"rank": 2, "targets": ["q_proj"]}}))
    for stage in ("rollout", "filter", "train", "publish"):
        runs.commit(run, 0, stage, data={})
    about = Path(run.start_adapter_dir, "adapter_config.json").read_bytes()
    save_adapter(run.weights_dir(1), load_adapter(run.start_adapter_dir), about, 1)
    digests = set()
    for version, adapter in ((0, run.start_adapter_dir), (1, run.weights_dir(1))):
        teacher = find_teacher(f"{run.uri}@{version}")
        with teacher.open() as opened:
            assert opened == (run.start_dir, adapter)
        digests.add(teacher.digest())
    # version and digest of the factors are in the file
    assert len(digests) == 2 and find_teacher(run.start_dir).digest() not in digests


def test_the_digest_is_of_weights_and_configuration_and_of_no_place(
    taught: RunDirectory, tmp_path: Path
) -> None:
    before = find_teacher(f"{taught.uri}@3").digest()
    (tmp_path / "moved").mkdir()
    moved = RunDirectory(str(Path(taught.uri).rename(tmp_path / "moved" / taught.run_id)))
    assert find_teacher(f"{moved.uri}@3").digest() == before
    assert find_teacher(f"{moved.uri}@2").digest() == find_teacher(moved.start_dir).digest() != before
    Path(moved.start_dir, "generation_config.json").write_text("{}", encoding="utf-8")
    assert find_teacher(f"{moved.uri}@3").digest() == before
    with open(Path(moved.start_dir, "config.json"), "a", encoding="utf-8") as file:
        file.write(" ")
    assert find_teacher(f"{moved.uri}@3").digest() != before


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("{run}@1", "taught: the weights of version 1 are not stored; stored versions: 0, 2, 3"),
        ("{run}@7", "taught: the weights of version 7 are not stored"),
        ("{run}x@3", "taughtx@3 is not a version of a run: "),
        ("{run}/weights", "is not a Hugging Face model folder (no config.json)"),
        ("{run}/nothing", "does not exist"),
        ("Qwen/Qwen3-8B", "and set train.teacher.model=Qwen3-8B"),
    ],
)
def test_what_is_no_teacher_is_refused_in_one_sentence(
    taught: RunDirectory, name: str, sentence: str
) -> None:
    with pytest.raises(ValueError) as refused:
        find_teacher(name.format(run=taught.uri))
    check_sentence(str(refused.value), "train.teacher.model: ", sentence)


def test_a_folder_whose_name_has_an_at_sign_is_a_folder(policy_copy: Path) -> None:
    folder = policy_copy.rename(policy_copy.with_name("model@3"))
    assert find_teacher(str(folder)).source == str(folder) and is_here(str(folder))
    assert not is_here(str(folder.with_name("other@3")))


def edit(folder: Path, change: Callable[[Tokenizer], object]) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_teacher_may_know_more_tokens_and_a_file_may_be_written_otherwise(
    small_policy: str, policy_copy: Path
) -> None:
    policy = Tokenizer.from_file(f"{small_policy}/tokenizer.json")
    edit(policy_copy, lambda tokenizer: tokenizer.add_tokens(["more"]))
    assert (policy_copy / "tokenizer.json").read_bytes() != Path(small_policy, "tokenizer.json").read_bytes()
    check_vocabulary(policy, policy.get_vocab_size(), str(policy_copy), "here")


def test_the_first_token_that_differs_is_named(small_policy: str, policy_copy: Path) -> None:
    policy = Tokenizer.from_file(f"{small_policy}/tokenizer.json")
    size = policy.get_vocab_size()
    policy.add_tokens(["more", "most"])
    with pytest.raises(ValueError) as refused:
        check_vocabulary(policy, size, str(policy_copy), "here")
    check_sentence(
        str(refused.value), "here: ", f"id {size} is 'more' for the policy and no token for the teacher"
    )
    edit(policy_copy, lambda tokenizer: tokenizer.add_tokens(["most", "more"]))
    with pytest.raises(ValueError, match=f"id {size} is 'more' for the policy and 'most' for the teacher"):
        check_vocabulary(policy, size, str(policy_copy), "here")


def test_a_teacher_must_have_a_tokenizer_and_know_every_id(small_policy: str, policy_copy: Path) -> None:
    policy = Tokenizer.from_file(f"{small_policy}/tokenizer.json")
    size = policy.get_vocab_size()
    with pytest.raises(ValueError) as refused:
        check_vocabulary(policy, size + 28, str(policy_copy), "here")
    check_sentence(str(refused.value), f"has {size:,} ids, but the policy can sample {size + 28:,}")
    (policy_copy / "config.json").unlink()
    # a tokenizer alone does not say it
    check_vocabulary(policy, size + 28, str(policy_copy), "here")
    (policy_copy / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"here: .*/tokenizer.json cannot be read: "):
        check_vocabulary(policy, size, str(policy_copy), "here")
    (policy_copy / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"here: .* has no tokenizer.json, which is needed to compare it"):
        check_vocabulary(policy, size, str(policy_copy), "here")
