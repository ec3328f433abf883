"""An adapter that the torch backend trains, against PEFT's own modules in transformers' own forward pass."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from sf_core.config.run_config import DtypeName
from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.torch import network
from sf_core.training.torch.network import Network
from sf_core.training.torch.ranks import Ranks, SingleRank
from sf_core.training.torch.torch_model import TorchModel
from storage import files
from storage.tensors.checkpoints import MASTER, has_checkpoint, load_checkpoint
from storage.tensors.weights import load_weights
from tests.bench import training, waits
from tests.bench.training import adapters


class TestContract(training.model_contract.ModelTests):
    backend = "sf_core.training.torch.backend:TorchBackend"
    layouts = ((1, {}), (1, {"recompute": True}), (2, {}), (2, {"recompute": True}))
    gradient_roundings = 128

    @pytest.fixture(
        params=[
            (training.policies.qwen, ()),
            (training.policies.neox, ()),
            *(
                pytest.param(policy, marks=pytest.mark.nightly)
                for policy in (
                    (training.policies.llama, ("q_proj", "v_proj", "up_proj")),
                    (training.policies.qwen2, ("k_proj", "o_proj", "down_proj")),
                    (training.policies.granite, ("q_proj", "gate_proj")),
                )
            ),
        ],
        ids=lambda param: f"{param[0].__name__}, {' '.join(param[1]) or 'all'}",
    )
    def policy(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        make, targets = request.param
        return adapters.save_with_adapter(make, str(tmp_path / "policy"), targets)

    def setup(self, folder: str, **train: Any) -> training.model_contract.Setup:
        return replace(super().setup(folder, **train), adapter=adapters.adapter_of(folder))

    def stored(self, folder: str) -> dict[str, torch.Tensor]:
        return load_weights(adapters.adapter_of(folder))

    def expected(
        self, folder: str, batch: pa.Table, dtype: torch.dtype = torch.float32, entropy: float = 0.0
    ) -> training.model_contract.Learnt:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = PeftModel.from_pretrained(base, adapters.adapter_of(folder), is_trainable=True).eval()
        found = training.model_contract.expected(model, batch, entropy)
        named = {name.replace(".default.", "."): g.numpy() for name, g in found.gradients.items()}
        return replace(found, gradients=named)


ARCHITECTURES = pytest.mark.parametrize(
    "make", [training.policies.qwen, training.policies.neox], ids=["lean", "transformers"]
)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
BATCHES = [
    training.batches.make_batch(training.batches.grouped_rows(4, 4), logprob=-4.0, group_size=4, seed=seed)
    for seed in range(3)
]


def list_frozen(model: TorchModel) -> dict[str, torch.Tensor]:
    named = model.network.model.named_parameters()
    return {name: getattr(p, "to_local", lambda p=p: p)() for name, p in named if not p.requires_grad}


@DTYPES
@ARCHITECTURES
def test_steps_change_every_factor_and_no_bit_of_the_base(
    tmp_path: Path, make: Any, dtype: DtypeName
) -> None:
    trainer = adapters.make_trainer(adapters.save_with_adapter(make, str(tmp_path)), dtype)
    assert isinstance(trainer.model, TorchModel)
    before = list_frozen(trainer.model)
    factors = adapters.masters_of(trainer)
    copies = {name: tensor.clone() for name, tensor in before.items()}
    for batch in BATCHES:
        trainer.step(batch)
    after = list_frozen(trainer.model)
    assert after.keys() == copies.keys() and all(torch.equal(after[n], copies[n]) for n in copies)
    assert {tensor.dtype for tensor in after.values()} == {getattr(torch, dtype)}
    assert all(tensor.grad is None for tensor in after.values())
    assert {tensor.dtype for tensor in adapters.masters_of(trainer).values()} == {torch.float32}
    assert not any(
        torch.equal(factors[name], tensor) for name, tensor in adapters.masters_of(trainer).items()
    )


@DTYPES
@ARCHITECTURES
def test_the_base_is_held_once_in_its_dtype(tmp_path: Path, make: Any, dtype: DtypeName) -> None:
    folder = adapters.save_with_adapter(partial(make, vocab_size=4096, hidden_size=128), str(tmp_path))
    base = sum(tensor.numel() for tensor in load_weights(folder).values())
    before = count_bytes()
    model = TorchModel(folder, SingleRank(), dtype=dtype, adapter=adapters.adapter_of(folder))
    factors = sum(tensor.numel() * 4 for _, tensor in model.slices([MASTER]).values())
    held = count_bytes() - before
    expected = base * getattr(torch, dtype).itemsize + factors
    # norms are fused and stay beside that, and there are tables of rotations
    assert expected <= held < 1.02 * expected
    (microbatch,) = pack(read_rows(BATCHES[0]), Packing(1 << 20))
    model.forward([microbatch], lambda _, logprobs, entropies: logprobs.sum())
    assert count_bytes() - before < 1.02 * expected


def count_bytes() -> int:
    """Bytes of all tensors of this process that Python sees."""
    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.device.type != "meta"]
    # one that is in pieces has no memory of its own
    parts = [one for one in found if not isinstance(one, DTensor)]
    storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
    return sum(storages.values())


def test_a_frozen_head_and_embedding_have_no_gradient_and_leave_that_of_the_factors(tmp_path: Path) -> None:
    folder = adapters.save_with_adapter(training.policies.qwen, str(tmp_path))
    (microbatch,) = pack(read_rows(BATCHES[0]), Packing(1 << 20))
    found = []
    for is_frozen in (True, False):
        made = Network(folder, adapter=adapters.adapter_of(folder))
        trained = made.trained
        made.model.get_output_embeddings().requires_grad_(not is_frozen)
        made.scores(microbatch)[0].sum().backward()
        assert (made.model.get_output_embeddings().weight.grad is None) == is_frozen
        found.append({name: p.grad for name, p in trained.items() if p.grad is not None})
    assert found[0].keys() == found[1].keys() == load_weights(adapters.adapter_of(folder)).keys()
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


@ARCHITECTURES
def test_the_order_of_factors_in_memory_is_not_that_in_which_they_were_read(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapters.save_with_adapter(make, str(tmp_path))
    factors = load_weights(adapters.adapter_of(folder))
    found = []
    for order in (sorted(factors), sorted(factors, reverse=True)):
        read = {name: factors[name] for name in order}
        monkeypatch.setattr(network, "load_adapter", lambda _, read=read: read)
        found.append(list(Network(folder, adapter=adapters.adapter_of(folder)).trained))
    assert found[0] == found[1]


# --- several ranks


def train(folder: str, dtype: DtypeName, settings: dict[str, Any], ranks: Ranks) -> Any:
    trainer = adapters.train_adapter(folder, dtype, settings, ranks)
    metrics = [trainer.step(batch) for batch in BATCHES]
    return metrics, {name: tensor.float().numpy() for name, tensor in trainer.weights().items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 3e-2)])
@ARCHITECTURES
def test_several_ranks_train_an_adapter_like_one(
    make_members: Callable[[int], list[training.gang.Member]],
    tmp_path: Path,
    make: Any,
    dtype: DtypeName,
    tolerance: float,
) -> None:
    folder = adapters.save_with_adapter(make, str(tmp_path / "policy"))
    settings = {
        "minibatches": 2,
        "tokens_per_microbatch": 128,
        "max_grad_norm": 0.05,
        "learning_rate": 1e-3,
        "loss": {"kl": {"coefficient": 0.1}},
    }
    expected_metrics, wanted = train(folder, dtype, settings, SingleRank())
    gang = make_members(2)
    one = training.gang.Try(str(tmp_path), tuple(member.worker for member in gang))
    for member in gang:
        member.sit(one, partial(train, folder, dtype, settings))
    found = [member.report() for member in gang]
    assert not any(isinstance(report, str) for report in found), found
    for name, array in wanted.items():
        np.testing.assert_allclose(found[0][1][name], array, rtol=tolerance, atol=tolerance / 2, err_msg=name)
    for metrics, _ in found:
        for mine, alone in zip(metrics, expected_metrics, strict=True):
            for name in ("loss", "grad_norm", "entropy", "kl_reference"):
                assert mine[name] == pytest.approx(alone[name], rel=tolerance, abs=tolerance), name


# --- the reference


@DTYPES
@ARCHITECTURES
@pytest.mark.parametrize("start_dtype", ["float32", "bfloat16"])
def test_at_the_start_the_divergence_from_the_reference_is_zero(
    tmp_path: Path, make: Any, dtype: DtypeName, start_dtype: str
) -> None:
    folder = adapters.save_with_adapter(make, str(tmp_path), dtype=start_dtype)
    trainer = adapters.make_trainer(folder, dtype, loss={"kl": {"coefficient": 0.1}})
    steps = [trainer.step(batch) for batch in BATCHES]
    assert steps[0]["kl_reference"] == 0.0
    assert steps[1]["kl_reference"] > 0.0 and steps[2]["kl_reference"] > 0.0


@DTYPES
@ARCHITECTURES
def test_another_version_stands_in_with_its_log_probs_and_the_factors_come_back_bit_for_bit(
    tmp_path: Path, make: Any, dtype: DtypeName
) -> None:
    folder = adapters.save_with_adapter(make, str(tmp_path / "policy"))
    other = str(tmp_path / "other")
    adapters.draw_adapter(f"{other}/adapter", folder, seed=1, dtype=dtype)
    model = adapters.make_trainer(folder, dtype).model
    assert isinstance(model, TorchModel)
    (microbatch,) = pack(read_rows(BATCHES[0]), Packing(1 << 20))

    def score(of: TorchModel) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def note(_: Any, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
            found.append(logprobs)
            return logprobs.sum()

        of.forward([microbatch], note)
        return found[0]

    own = score(model)
    masters = {name: one.clone() for name, (_, one) in model.slices([MASTER]).items()}
    with pytest.raises(InterruptedError), model.replaced_weights(load_weights(f"{other}/adapter")):
        stood_in = score(model)
        raise InterruptedError
    alone = TorchModel(folder, SingleRank(), dtype=dtype, adapter=f"{other}/adapter")
    assert torch.equal(stood_in, score(alone)) and not torch.equal(stood_in, own)
    assert torch.equal(score(model), own)
    assert all(torch.equal(masters[name], one) for name, (_, one) in model.slices([MASTER]).items())


@pytest.mark.parametrize(
    "settings",
    [{"loss": {"kl": {"coefficient": 0.1}}}, {"teacher": {"weights": "start"}}],
    ids=["reference", "teacher"],
)
def test_a_checkpoint_that_is_being_stored_has_the_policy_and_not_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    folder = adapters.save_with_adapter(training.policies.qwen, str(tmp_path / "policy"))
    trainer = adapters.make_trainer(folder, **settings)
    trainer.step(BATCHES[0])
    masters = adapters.masters_of(trainer)
    may_write = threading.Event()
    checkpoint = str(tmp_path / "checkpoint")
    wait = trainer.await_checkpoint
    write = files.HashedFile.write
    stand_in = TorchModel.replaced_weights

    def wait_in_the_step() -> None:
        may_write.set()
        wait()

    def late(file: files.HashedFile, data: bytes | memoryview) -> int:
        may_write.wait(waits.patience())
        return write(file, data)

    @contextmanager
    def stand_in_while_it_is_stored(model: TorchModel, weights: Any) -> Iterator[None]:
        with stand_in(model, weights):
            may_write.set()
            waits.wait_until(lambda: has_checkpoint(checkpoint), "the checkpoint")
            yield

    monkeypatch.setattr(files.HashedFile, "write", late)
    monkeypatch.setattr(TorchModel, "replaced_weights", stand_in_while_it_is_stored)
    trainer.save_checkpoint(checkpoint)
    monkeypatch.setattr(trainer, "await_checkpoint", wait_in_the_step)
    trainer.step(BATCHES[1])
    found, _ = load_checkpoint(checkpoint, trainer.model.slices_by_name)
    assert all(torch.equal(found[name], tensor) for name, tensor in masters.items())
