"""`sf model`: folders made of GGUF files and of what a package index has, and how others are refused."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sf_core.models.pretrained import published
from sf_core.models.pretrained.published import (
    PublishedModel,
    download_published_model,
    folder_of,
    make_folder,
)
from sf_core.training.policy_folder import check_model_folder, policy_folder
from tests.bench.commands import sf
from tests.sf_core.models.pretrained import gguf_files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SF_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    gguf_files.write_gguf(file, gguf_files.small_llama())
    return file


def test_a_folder_has_the_weights_of_the_file_rounded_to_bfloat16(gguf_file: Path, tmp_path: Path) -> None:
    make_folder(gguf_file, tmp_path / "policy")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    whole = gguf_files.small_llama()
    assert made.dtype == torch.bfloat16
    for name, tensor in whole.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor.bfloat16()), name
    assert "quantization_config" not in json.loads(
        (tmp_path / "policy" / "config.json").read_text(encoding="utf-8")
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert (tokenizer.chat_template, tokenizer.eos_token) == (gguf_files.TEMPLATE, "<end>")
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    check_model_folder(str(tmp_path / "policy"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_command_makes_a_folder_and_says_what_it_is(gguf_file: Path, tmp_path: Path) -> None:
    code, said = sf("model", str(gguf_file), str(tmp_path / "policy"))
    assert code == 0, said
    assert "llama, 0 million parameters, 128 positions; its chat template shows no tools" in said
    assert f"policy.model: {tmp_path / 'policy'}" in said
    code, again = sf("model", str(tmp_path / "policy"))
    assert code == 0 and said.endswith(again)
    code, said = sf("model", str(gguf_file), str(tmp_path / "policy"))
    assert code == 2 and "already exists" in said


def test_what_no_folder_can_be_made_of_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(20))
    for arguments, message in [
        (
            [str(gguf_file)],
            f"is a GGUF file: add the name of the folder to create (`sf model {gguf_file} DIR`)",
        ),
        ([str(tmp_path / "broken.gguf"), str(tmp_path / "x")], "cannot be read by transformers"),
        (["smollm3"], "smollm3 is not a Hugging Face model folder"),
        (["smollm3", str(tmp_path / "x")], "is neither a GGUF file nor one of smollm2, smollm2-tools"),
    ]:
        code, said = sf("model", *arguments)
        assert code == 2 and message in said, said
    assert not (tmp_path / "x").exists()


@pytest.fixture
def index(gguf_file: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """The wheel `small_model` where a user without a network would put it."""
    wheel = cache / "downloads" / "small_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "small_model/small.gguf")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    small = PublishedModel(
        "a small one", wheel.name, digest, 1, "small_model/small.gguf", "{{ messages }} <end>"
    )
    monkeypatch.setitem(published.PUBLISHED, "small", small)
    return wheel


def test_a_published_policy_gets_a_name(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="small is not on this machine yet: `sf model small` downloads it"):
        check_model_folder(policy_folder("small"))
    told: list[str] = []
    download_published_model("small", folder_of("small"), told.append)
    assert told[0] == "small: a small one" and len(told) == 2
    assert policy_folder("small") == str(folder_of("small"))
    assert AutoTokenizer.from_pretrained(policy_folder("small")).chat_template == "{{ messages }} <end>"
    # a folder of the same name in the current one comes first
    assert policy_folder(str(tmp_path)) == str(tmp_path)


def test_a_changed_wheel_is_refused(index: Path) -> None:
    index.write_bytes(index.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="is not the published file: its SHA-256 is"):
        download_published_model("small", folder_of("small"), print)
    assert not folder_of("small").exists()


def test_without_a_network_the_message_says_what_to_put_where(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.unlink()
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    code, said = sf("model", "small")
    assert code == 2 and "small-model==1.0 cannot be downloaded (" in said
    assert f"put the file {index.name} of the Python package index into {index.parent}" in said


def test_quantised_weights_and_gguf_files_are_refused_as_policies(gguf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a GGUF file: `sf model .* DIR` converts it to a folder"):
        check_model_folder(str(gguf_file))
    make_folder(gguf_file, tmp_path / "policy")
    shape = json.loads((tmp_path / "policy" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "policy" / "config.json").write_text(
        json.dumps(shape | {"quantization_config": {"quant_method": "gptq"}}), encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"are quantised \(gptq\); training needs unquantised weights"):
        check_model_folder(str(tmp_path / "policy"))
