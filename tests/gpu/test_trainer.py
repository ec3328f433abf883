"""One rank on a GPU, against float32 on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from sf_core.config import RunConfig, TrainConfig
from sf_core.config.devices import WorkerDevice
from sf_core.training.megatron.backend import MegatronBackend
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.ranks import SingleRank
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from tests.bench.training.adapters import draw_adapter
from tests.bench.training.batches import grouped_rows, make_batch

BATCHES = [
    make_batch(grouped_rows(4, 4, sampled=40), logprob=-6.0, group_size=4, seed=seed) for seed in range(3)
]


def make_trainer(
    folder: str,
    device: str,
    dtype: Literal["float32", "bfloat16"],
    adapter: str | None = None,
    **settings: Any,
) -> ModelTrainer:
    make_model = partial(TorchModel, folder, device=device, dtype=dtype, adapter=adapter)
    return ModelTrainer(make_model, TrainConfig.model_validate(settings), seed=0, dtype=dtype)


@pytest.mark.parametrize("backend", [TorchBackend, MegatronBackend])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_a_step_measures_what_the_cpu_measures(
    gpu_policy: str, backend: type[TorchBackend], dtype: Literal["float32", "bfloat16"], tolerance: float
) -> None:
    expected = make_trainer(gpu_policy, "cpu", "float32").step(BATCHES[0])
    config = RunConfig.model_validate({"policy": {"model": gpu_policy, "dtype": dtype}})
    make_model = partial(backend(WorkerDevice()).make_model, config, gpu_policy, device="cuda")
    found = ModelTrainer(make_model, config.train, seed=0, dtype=dtype).step(BATCHES[0])
    for name in ("loss", "entropy", "kl", "grad_norm", "logprob_difference_mean"):
        assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("trains_adapter", [False, True], ids=["all weights", "an adapter"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_that_rests_gives_its_memory_back_and_goes_on_bit_for_bit(
    gpu_policy: str, tmp_path: Path, dtype: Literal["float32", "bfloat16"], trains_adapter: bool
) -> None:
    adapter = str(tmp_path) if trains_adapter else None
    if adapter is not None:
        draw_adapter(adapter, gpu_policy)
    straight, resting = (make_trainer(gpu_policy, "cuda", dtype, adapter) for _ in range(2))
    for batch in BATCHES:
        straight.step(batch)
    expected = {name: tensor.float().numpy() for name, tensor in straight.weights().items()}
    del straight
    for batch in BATCHES:
        resting.model.wake()
        resting.step(batch)
        before = torch.cuda.memory_allocated()
        resting.model.rest()
        assert torch.cuda.memory_allocated() < before / 10
    for name, tensor in resting.weights().items():
        assert np.array_equal(tensor.float().numpy(), expected[name]), name


def test_recomputed_blocks_take_less_memory_and_give_the_same_weights(gpu_policy: str) -> None:
    peaks = []
    weights = []
    for recompute in (False, True):
        model = TorchModel(gpu_policy, SingleRank(), device="cuda", dtype="bfloat16", recompute=recompute)
        trainer = ModelTrainer(lambda _, model=model: model, TrainConfig(), seed=0)
        torch.cuda.reset_peak_memory_stats()
        trainer.step(make_batch(grouped_rows(16, 8, sampled=200), logprob=-6.0, group_size=8))
        peaks.append(torch.cuda.max_memory_allocated())
        weights.append(trainer.weights())
    assert peaks[1] < peaks[0]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-5, rtol=1e-4)
