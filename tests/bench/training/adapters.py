"""Adapters that a run may start from, and trainers of them."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sf_core.config import TrainConfig
from sf_core.config.run_config import DtypeName
from sf_core.models.adapter import Adapter, make_factors, shape_factors
from sf_core.training.torch.ranks import Ranks, SingleRank
from sf_core.training.torch.teaching import FrozenModels, Name
from sf_core.training.torch.torch_model import AdapterVersionModel, TorchModel
from sf_core.training.torch.trained_model import DistributedModel, TrainedModel
from sf_core.training.torch.trainer import ModelTrainer
from storage.tensors.checkpoints import MASTER
from storage.tensors.weights import load_weights, save_adapter
from tests.bench.engines.model_folders import linears_of


def draw_adapter(
    folder: str,
    model_dir: str,
    *,
    rank: int = 4,
    alpha: float = 6.0,
    targets: Collection[str] = (),
    seed: int = 0,
    dtype: str | None = None,
    changes: bool = True,
) -> Adapter:
    """Store an adapter of the model in the folder. `targets`: all linear layers unless named. `changes`: its
    lora_B is not zero, so that the model with it is another one."""
    linears = linears_of(model_dir)
    names = sorted(targets or {layer.rpartition(".")[2] for layer in linears})
    adapter = Adapter(rank, alpha, tuple(names))
    factors = make_factors(shape_factors(adapter, linears), seed)
    random = torch.Generator().manual_seed(seed)
    for name, tensor in factors.items():
        if changes and "lora_B" in name:
            tensor.normal_(0, 0.05, generator=random)
    save_adapter(folder, factors, adapter.encode("a test"), 0, dtype)
    return adapter


def adapter_of(folder: str) -> str:
    """The folder of the adapter that `save_with_adapter` has made."""
    return f"{folder}/adapter"


def save_with_adapter(make: Any, folder: str, targets: Collection[str] = (), **settings: Any) -> str:
    """Store a model, and an adapter of it; returns the model's folder."""
    torch.manual_seed(0)
    model = make()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            # norms that are all one could be left out of the factors
            parameter.data += torch.empty_like(parameter).uniform_(-0.1, 0.1)
    model.save_pretrained(folder)
    draw_adapter(adapter_of(folder), folder, targets=targets, **settings)
    return folder


def make_trainer(folder: str, dtype: DtypeName = "float32", **settings: Any) -> ModelTrainer:
    return train_adapter(folder, dtype, settings, SingleRank())


def train_adapter(folder: str, dtype: DtypeName, settings: dict[str, Any], ranks: Ranks) -> ModelTrainer:
    """Its reference is the adapter that it starts from."""

    def load(_: Name, model: TrainedModel) -> tuple[DistributedModel, str]:
        assert isinstance(model, TorchModel)
        return AdapterVersionModel(model, load_weights(adapter_of(folder))), ""

    return ModelTrainer(
        partial(TorchModel, folder, dtype=dtype, adapter=adapter_of(folder)),
        TrainConfig.model_validate({"learning_rate": 1e-2} | settings),
        seed=0,
        ranks=ranks,
        dtype=dtype,
        frozen=FrozenModels(load),
        adapter=Path(adapter_of(folder), "adapter_config.json").read_bytes(),
        base="a digest",
    )


def masters_of(trainer: ModelTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, (_, tensor) in trainer.model.slices([MASTER]).items()}
