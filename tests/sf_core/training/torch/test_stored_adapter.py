"""What a trainer of an adapter stores: versions, checkpoints, and what it goes on from."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sf_core.cli.replay import replay
from sf_core.config.devices import WorkerDevice
from sf_core.config.run_config import DtypeName
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.ranks import SingleRank
from storage import files
from storage.tensors.checkpoints import PARTS, remove_checkpoint
from storage.tensors.weights import load_weights, open_weights, remove_weights
from tests.bench import closeness, training
from tests.bench.trained_runs import train_run

ARCHITECTURES = pytest.mark.parametrize(
    "make", [training.policies.qwen, training.policies.neox], ids=["lean", "transformers"]
)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
BATCHES = [
    training.batches.make_batch(training.batches.grouped_rows(4, 4), logprob=-4.0, group_size=4, seed=seed)
    for seed in range(3)
]


@DTYPES
@ARCHITECTURES
def test_peft_loads_what_is_published_and_computes_what_the_trainer_does(
    tmp_path: Path, make: Any, dtype: DtypeName
) -> None:
    folder = training.adapters.save_with_adapter(make, str(tmp_path / "policy"))
    published = str(tmp_path / "v1")
    trainer = training.adapters.make_trainer(folder, dtype)
    trainer.step(BATCHES[0])
    refs = trainer.save_weights(published, training.adapters.adapter_of(folder))
    assert [Path(ref.uri).name for ref in refs] == ["adapter_model.safetensors", "adapter_config.json"]
    stored = load_weights(published)
    assert {tensor.dtype for tensor in stored.values()} == {getattr(torch, dtype)}
    assert open_weights(published)[0].metadata["version"] == "1"
    assert all(torch.equal(tensor, stored[name]) for name, tensor in trainer.weights().items())
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if dtype == "bfloat16":
        base.to(torch.bfloat16).to(torch.float32)
    peft = PeftModel.from_pretrained(base, published).eval()
    (microbatch,) = pack(read_rows(BATCHES[1]), Packing(1 << 20))
    found: list[float] = []

    def note(_: Any, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        found.extend(logprobs.tolist())
        return logprobs.sum()

    trainer.model.forward([microbatch], note)
    with torch.no_grad():
        wanted = training.model_contract.expected_logprobs(peft, BATCHES[1])
    if dtype == "float32":
        closeness.assert_rounded(found, wanted, closeness.FORWARD)
    else:
        np.testing.assert_allclose(found, wanted, atol=0.05)


def test_a_checkpoint_has_factors_alone_and_names_their_base(tmp_path: Path) -> None:
    folder = training.adapters.save_with_adapter(
        training.policies.llama, str(tmp_path / "policy"), ("q_proj", "up_proj")
    )
    trainer = training.adapters.make_trainer(folder)
    trainer.step(BATCHES[0])
    checkpoint = tmp_path / "checkpoint"
    trainer.save_checkpoint(str(checkpoint))
    trainer.await_checkpoint()
    names = load_file(checkpoint / "shard-1-of-1.safetensors").keys()
    assert names == {
        f"{part}/{name}" for part in PARTS for name in load_weights(training.adapters.adapter_of(folder))
    }
    assert json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["base"] == "a digest"


def test_a_checkpoint_for_another_base_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = training.adapters.save_with_adapter(training.policies.qwen, str(tmp_path / "policy"))
    checkpoint = str(tmp_path / "checkpoint")
    trainer = training.adapters.make_trainer(folder)
    trainer.step(BATCHES[0])
    trainer.save_checkpoint(checkpoint)
    trainer.await_checkpoint()
    other = training.adapters.make_trainer(folder)
    other._base = "another digest"
    before = training.adapters.masters_of(other)
    with pytest.raises(ValueError) as refused:
        other.load_checkpoint(checkpoint)
    assert (
        str(refused.value)
        == f"{checkpoint}: belongs to an adapter of other weights than the weights at the start of the run"
    )
    assert other.version == 0
    assert all(
        torch.equal(before[name], tensor) for name, tensor in training.adapters.masters_of(other).items()
    )


@pytest.mark.parametrize("changed", ["start/model.safetensors", "start/adapter/adapter_model.safetensors"])
def test_a_run_goes_on_from_checkpoints_for_its_own_base_alone(
    tmp_path: Path, changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = train_run(tmp_path, {"lora": {}, "checkpoint_every": 1}, BATCHES)
    manifest = run.read_manifest(None, "start")
    assert manifest is not None
    outputs = [replace(ref, sha256="0" * 64) if ref.uri == changed else ref for ref in manifest.outputs]
    assert outputs != manifest.outputs
    content = manifest.model_copy(update={"outputs": outputs}).model_dump_json()
    files.write_atomic(run.manifest_file(None, "start"), content.encode())
    opened = OpenRun(RunRef(run.run_id, run.uri, dataplane_url="", attempt=1))
    TorchBackend(WorkerDevice()).rebuild_trainer(opened, 3, SingleRank())
    is_refused = (
        "belongs to an adapter of other weights than the weights at the start of the run; the previous "
        "checkpoint" in caplog.text
    )
    assert is_refused == (changed == "start/model.safetensors")
    assert ("version 3 is computed again from version 0" in caplog.text) == is_refused


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_bit_for_bit_from_each_of_its_checkpoints(tmp_path: Path, dtype: str) -> None:
    policy = {"hidden_size": 32, "num_layers": 1, "warmstart": None, "dtype": dtype}
    settings = {"lora": {}, "checkpoint_every": 1, "loss": {"kl": {"coefficient": 0.1, "renew_every": 2}}}
    run = train_run(tmp_path, settings, BATCHES, policy=policy)
    opened = OpenRun(RunRef(run.run_id, run.uri, dataplane_url="", attempt=1))
    stored = load_weights(run.weights_dir(3))
    for version in (3, 2, 1, 0):
        assert run.list_versions("checkpoints") == list(range(1, version + 1))
        trainer = TorchBackend(WorkerDevice()).rebuild_trainer(opened, 3, SingleRank())
        assert all(torch.equal(tensor, stored[name]) for name, tensor in trainer.weights().items())
        remove_checkpoint(run.checkpoint_dir(version))


def test_a_step_of_an_adapter_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    run = train_run(tmp_path, {"lora": {}, "loss": {"kl": {"coefficient": 0.1}}}, BATCHES)
    found = replay(run.uri, 2)
    assert found.equal and found.largest_difference == 0.0 and not found.metrics


def test_a_reference_that_is_gone_is_named(tmp_path: Path) -> None:
    settings = {"lora": {}, "checkpoint_every": 1, "loss": {"kl": {"coefficient": 0.1, "renew_every": 2}}}
    run = train_run(tmp_path, settings, BATCHES)
    remove_weights(run.weights_dir(2))
    opened = OpenRun(RunRef(run.run_id, run.uri, dataplane_url="", attempt=1))
    trainer = TorchBackend(WorkerDevice()).rebuild_trainer(opened, 3, SingleRank())
    with pytest.raises(ValueError, match=r"v00002 no longer exists, but version 2 is the reference"):
        trainer.step(BATCHES[0])


def test_without_peft_only_what_the_lean_decoder_knows_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean, other = (
        training.adapters.save_with_adapter(make, str(tmp_path / make.__name__))
        for make in (training.policies.qwen, training.policies.neox)
    )
    monkeypatch.setitem(sys.modules, "peft", None)
    training.adapters.make_trainer(lean).step(BATCHES[0])
    with pytest.raises(ValueError) as refused:
        training.adapters.make_trainer(other)
    assert str(refused.value) == (
        "train.lora with a model of model_type gpt_neox needs the package peft, which this Python does not "
        "have: pip install 'seamlessflow[lora]'"
    )
