"""The functions of docs/guides/training/your-loss.md, loaded as a run loads them and trained with."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sf_core.config.run_config import RunConfig
from sf_core.config.yaml_file import load_config
from sf_core.recipes.weights import weigh
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from tests.bench import training
from tests.sf_core.recipes import batches

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "training" / "your-loss.md").read_text(
    encoding="utf-8"
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The configuration of the page, behind the quickstart's."""
    for language, name in {"yaml": "my-loss.yaml", "python": "my_loss.py"}.items():
        [block] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
        assert block.startswith(f"# {name}")
        (tmp_path / name).write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return load_config(["quickstart", tmp_path / "my-loss.yaml"])


def test_the_advantage_and_the_weight_of_the_page_are_those_that_it_describes(config: RunConfig) -> None:
    drawn = batches.samples([0.0, 1.0, 5.0], [0, 0, 0], logprobs=[np.array([0, -0.01, -2], np.float32)] * 3)
    advantages, factors = weigh(drawn, config.train.advantage, config.train.weights)
    assert batches.of_sessions(advantages).tolist() == [-1.0, 0.0, 4.0]
    assert [row.tolist() for row in factors] == [[1.0, 0.5, 1.0]] * 3


def test_the_loss_of_the_page_trains_a_policy(config: RunConfig, two_layer_policy: str) -> None:
    settings = config.train.model_copy(update={"learning_rate": 1e-3})
    trainer = ModelTrainer(partial(TorchModel, two_layer_policy), settings, seed=0)
    batch = training.batches.make_batch(
        training.batches.grouped_rows(num_groups=4, group_size=4), logprob=-4.0, group_size=4
    )
    losses = [trainer.step(batch)["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
