"""Teachers in a train step, against their definition: each row by itself, by transformers' forward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
import pytest
import torch

from sf_core.config import PolicyConfig, TrainConfig
from sf_core.models.builtin import make_policy
from sf_core.training.torch.ranks import Ranks, SingleRank
from sf_core.training.torch.teaching import FrozenModels
from sf_core.training.torch.torch_model import FrozenModel, TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from storage.tensors.checkpoints import MASTER
from tests.bench.training.batches import grouped_rows, make_batch

TEMPERATURE = 0.8
DIVERGENCES = pytest.mark.parametrize("divergence", ["reverse", "forward", "sampled"])


def drawn(seed: int) -> pa.Table:
    """Groups with shared prompts, as the filter stores them with `train.advantage: none`."""
    rows = grouped_rows(3, 4, prompt=4)
    batch = make_batch(rows, logprob=-4.0, group_size=4, seed=seed, sampling=(TEMPERATURE, 1.0, 0))
    nothing = pa.array([[0.0] * len(ids) for ids, _ in rows], batch.schema.field("advantages").type)
    return batch.set_column(batch.schema.get_field_index("advantages"), "advantages", nothing)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The policy and the teacher."""
    root = tmp_path_factory.mktemp("policies")
    for seed, (name, width) in enumerate((("policy", 32), ("teacher", 64))):
        make_policy(str(root / name), PolicyConfig(hidden_size=width, num_layers=2), seed)
    return str(root / "policy"), str(root / "teacher")


def make_trainer(
    policy: str, teacher: str, ranks: Ranks, said: dict[str, Any], **settings: Any
) -> ModelTrainer:
    given = {"advantage": "none", "teacher": {"model": teacher, **said}}
    return ModelTrainer(
        partial(TorchModel, policy),
        TrainConfig.model_validate({"learning_rate": 1e-2} | given | settings),
        seed=0,
        ranks=ranks,
        frozen=FrozenModels(lambda name, _: (FrozenModel(str(name), ranks, dtype="auto"), "a digest")),
    )


def read_parts(trainer: ModelTrainer, ranks: Ranks, part: str) -> dict[str, Any]:
    slices = {key.partition("/")[2]: one for key, one in trainer.model.slices([part]).items()}
    return {key: one.numpy().copy() for key, one in ranks.collect(slices, torch.float32).items()}


@DIVERGENCES
def test_the_start_as_teacher_changes_no_bit(folders: tuple[str, str], divergence: str) -> None:
    trainer = make_trainer(folders[0], folders[0], SingleRank(), {"divergence": divergence}, minibatches=2)
    before = read_parts(trainer, SingleRank(), MASTER)
    for seed in range(3):
        metrics = trainer.step(drawn(seed))
        assert metrics["teacher_kl"] == metrics["grad_norm"] == 0
    after = read_parts(trainer, SingleRank(), MASTER)
    assert all((after[name] == array).all() for name, array in before.items())
