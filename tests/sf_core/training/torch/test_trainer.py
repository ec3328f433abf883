import math
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from sf_core.config import TrainConfig
from sf_core.models.scoring import score
from sf_core.recipes.losses import Clip, Tokens
from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.torch.network import Network
from sf_core.training.torch.step_metrics import MAX_PARTS
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from tests.bench.training.batches import grouped_rows, make_batch

BATCH = make_batch(grouped_rows(num_groups=4, group_size=4), logprob=-4.0, group_size=4)


def make_trainer(folder: str, **settings: object) -> ModelTrainer:
    config = TrainConfig.model_validate({"learning_rate": 1e-3, **settings})
    return ModelTrainer(partial(TorchModel, folder), config, seed=0)


def test_steps_on_a_fixed_batch_lower_its_loss(two_layer_policy: str) -> None:
    trainer = make_trainer(two_layer_policy)
    losses = [trainer.step(BATCH)["loss"] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert trainer.version == 5


def test_training_goes_on_bit_for_bit_from_a_checkpoint(two_layer_policy: str, tmp_path: Path) -> None:
    settings = {"minibatches": 2, "warmup_steps": 5}
    straight = make_trainer(two_layer_policy, **settings)
    for _ in range(2):
        straight.step(BATCH)
    straight.save_checkpoint(str(tmp_path / "checkpoint"))
    straight.await_checkpoint()
    resumed = make_trainer(two_layer_policy, **settings)
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    assert resumed.version == 2
    for _ in range(2):
        first = straight.step(BATCH)
        second = resumed.step(BATCH)
        assert first["loss"] == second["loss"] and first["grad_norm"] == second["grad_norm"]
    expected = straight.weights()
    weights = resumed.weights()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


def test_settings_that_changed_count_in_the_next_step_with_and_without_a_checkpoint(
    two_layer_policy: str, tmp_path: Path
) -> None:
    changes = {"learning_rate": 2e-3, "betas": (0.5, 0.6), "weight_decay": 0.1}
    straight = make_trainer(two_layer_policy)
    resumed = make_trainer(two_layer_policy, **changes)
    unchanged = make_trainer(two_layer_policy)
    straight.step(BATCH)
    straight.save_checkpoint(str(tmp_path / "checkpoint"))
    straight.await_checkpoint()
    for trainer in (resumed, unchanged):
        trainer.load_checkpoint(str(tmp_path / "checkpoint"))
    straight.config = resumed.config
    for trainer in (straight, resumed, unchanged):
        trainer.step(BATCH)
    expected, weights, others = (trainer.weights() for trainer in (straight, resumed, unchanged))
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
    assert not all(torch.equal(expected[name], others[name]) for name in expected)


def test_a_step_done_again_is_equal_bit_for_bit(two_layer_policy: str) -> None:
    batch = make_batch(grouped_rows(num_groups=32, group_size=8), logprob=-4.0, group_size=8)
    trainers = [make_trainer(two_layer_policy) for _ in range(3)]
    for trainer in trainers:
        trainer.step(batch)
    first, *others = (trainer.weights() for trainer in trainers)
    assert all(torch.equal(first[name], weights[name]) for weights in others for name in first)


def test_a_step_that_diverges_is_refused_and_says_what_to_change(two_layer_policy: str) -> None:
    index = BATCH.schema.get_field_index("advantages")
    kind = BATCH.schema.field("advantages").type
    advantages = pa.array([[math.inf] * len(ids) for ids in BATCH["token_ids"].to_pylist()], kind)
    with pytest.raises(ValueError, match="on the way to version 1: the gradient is not finite"):
        make_trainer(two_layer_policy).step(BATCH.set_column(index, "advantages", advantages))
    with pytest.raises(
        ValueError, match=r"a weight is not finite; .* lower train\.learning_rate, now 1e\+39"
    ):
        make_trainer(two_layer_policy, learning_rate=1e39).step(BATCH)


def test_published_weights_load_into_the_auto_class(two_layer_policy: str, tmp_path: Path) -> None:
    trainer = make_trainer(two_layer_policy)
    trainer.step(BATCH)
    AutoModelForCausalLM.from_pretrained(two_layer_policy).config.save_pretrained(tmp_path)
    save_file(trainer.weights(), tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = loaded.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in trainer.weights().items())


def test_metrics_describe_the_batch(two_layer_policy: str) -> None:
    trainer = make_trainer(two_layer_policy)
    metrics = trainer.step(BATCH)
    trained = sum(sum(mask) for mask in BATCH["loss_mask"].to_pylist())
    assert metrics["tokens"] == trained and metrics["rows"] == 16
    assert metrics["lag_mean"] == metrics["lag_max"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_branches_of_a_session_count_once_in_rewards_and_advantages(two_layer_policy: str) -> None:
    rows = [([i, i + 1, i + 2], [False, True, True]) for i in range(6)]
    batch = make_batch(rows, logprob=-4.0, group_size=6, equal=2, branches=2)
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    batch = batch.set_column(batch.schema.get_field_index("reward"), "reward", [rewards])
    batch = pa.concat_tables([batch, batch.slice(5)])  # a third branch of the last session
    metrics = make_trainer(two_layer_policy).step(batch)
    assert metrics["reward_mean"] == pytest.approx(1 / 3)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(2) / 3)
    assert metrics["zero_advantage_share"] == pytest.approx(1 / 3)
    assert metrics["rows"] == 7


def named(parts: dict[str, float]) -> list[dict[str, str | float]]:
    return [{"name": name, "value": value} for name, value in parts.items()]


def test_each_part_of_the_reward_has_its_mean_and_names_are_such_as_trackers_take(
    two_layer_policy: str,
) -> None:
    parts = [named({"a b:c": 1.0, "short": 0.5}), named({"short": 0.0}), *[[]] * 14]
    column = pa.array(parts, BATCH.schema.field("reward_parts").type)
    index = BATCH.schema.get_field_index("reward_parts")
    metrics = make_trainer(two_layer_policy).step(BATCH.set_column(index, "reward_parts", column))
    assert {name: value for name, value in metrics.items() if name.startswith("reward.")} == {
        "reward.a b_c": 1.0,
        "reward.short": 0.25,
    }
    many = pa.array([named({f"part {i:02}": 1.0 for i in range(20)})] * len(BATCH), column.type)
    metrics = make_trainer(two_layer_policy).step(BATCH.set_column(index, "reward_parts", many))
    assert len([name for name in metrics if name.startswith("reward.")]) == MAX_PARTS


def test_data_of_an_older_version_has_lag_and_says_nothing_about_the_engine(two_layer_policy: str) -> None:
    trainer = make_trainer(two_layer_policy)
    trainer.step(BATCH)
    metrics = trainer.step(BATCH)
    assert metrics["lag_mean"] == metrics["lag_max"] == 1
    assert math.isnan(metrics["engine_difference_mean"])


@pytest.mark.parametrize("sampling", [(1.0, 1.0, 0), (0.5, 1.0, 0), (1.0, 0.5, 0), (1.0, 1.0, 7)])
def test_data_sampled_by_the_policy_itself_has_ratio_one_and_no_divergence(
    two_layer_policy: str, sampling: tuple[float, float, int]
) -> None:
    """Whatever the temperature, top-p and top-k."""
    trainer = make_trainer(two_layer_policy)
    drawn = make_batch(grouped_rows(num_groups=4, group_size=4), group_size=4, sampling=sampling)
    rows = read_rows(drawn)
    (microbatch,) = pack(rows, Packing(1 << 20))
    logits = Network(two_layer_policy).logits(microbatch)
    how = microbatch.sampling
    scores, _ = score(logits, None, microbatch.targets, how["temperature"], how["top_p"], how["top_k"])
    recorded = scores.tolist()
    in_packed_order = sorted(range(len(rows)), key=lambda i: rows[i].token_ids.tolist())
    logprobs: list[list[float | None]] = [[] for _ in rows]
    for i in in_packed_order:
        logprobs[i] = [recorded.pop(0) if sampled else None for sampled in rows[i].loss_mask]
    batch = drawn.set_column(drawn.schema.get_field_index("logprobs"), "logprobs", [logprobs])
    metrics = trainer.step(batch)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["engine_difference_max"] == pytest.approx(0.0, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0


def test_the_learning_rate_warms_up(two_layer_policy: str) -> None:
    trainer = make_trainer(two_layer_policy, warmup_steps=3)
    rates = [trainer.step(BATCH)["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


def test_every_part_of_a_batch_is_an_optimiser_step_of_its_own(two_layer_policy: str) -> None:
    trainer = make_trainer(two_layer_policy, warmup_steps=3, minibatches=2)
    assert [trainer.step(BATCH)["learning_rate"] for _ in range(2)] == pytest.approx([0.5e-3, 1e-3])


def test_a_gradient_beyond_the_largest_norm_is_scaled_down_to_it(two_layer_policy: str) -> None:
    # so small that Adam's epsilon of 1e-8 outweighs it, and its step with it
    trainer = make_trainer(two_layer_policy, max_grad_norm=1e-9)
    before = trainer.weights()
    assert trainer.step(BATCH)["grad_norm"] > 0.01, "what is measured is what there was"
    assert max(float((new - before[name]).abs().max()) for name, new in trainer.weights().items()) < 1e-4


def test_the_gradient_is_that_of_the_weighted_mean_over_all_trained_tokens(two_layer_policy: str) -> None:
    """Each row by itself, by the definition: whatever is shared, packed or left out makes no difference."""
    loss = Clip(low=0.1, high=0.6, cap=2.0)
    trainer = make_trainer(two_layer_policy, tokens_per_microbatch=64, loss={"policy": loss})
    batch = make_batch(grouped_rows(4, 4), group_size=4, equal=4, sampling=(0.7, 1.0, 0))
    random = np.random.default_rng(0)
    logprobs = [
        [float(random.uniform(-8, -3)) if sampled else None for sampled in mask]
        for mask in batch["loss_mask"].to_pylist()
    ]
    weighed = [random.uniform(0.2, 3.0, len(ids)).tolist() for ids in batch["token_ids"].to_pylist()]
    for name, values in {"logprobs": logprobs, "weights": weighed}.items():
        kind = batch.schema.field(name).type
        batch = batch.set_column(batch.schema.get_field_index(name), name, pa.array(values, kind))
    losses = []
    weights = []
    model = AutoModelForCausalLM.from_pretrained(two_layer_policy).eval()
    for row in read_rows(batch):
        ids = torch.from_numpy(row.token_ids).long()
        (trained,) = np.nonzero(row.loss_mask)
        scores = (model(ids.unsqueeze(0)).logits[0, trained - 1] / 0.7).log_softmax(-1)
        new = scores.gather(1, ids[trained].unsqueeze(1)).squeeze(1)
        old = torch.from_numpy(row.logprobs[trained])
        advantages = torch.from_numpy(row.advantages[trained])
        of_row = torch.from_numpy(row.weights[trained])
        tokens = Tokens(new, old, advantages, torch.zeros(len(trained), dtype=torch.long), 1)
        losses.append(of_row * loss(tokens))
        weights += of_row.tolist()
    (torch.cat(losses).sum() / sum(weights)).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert trainer.step(batch)["grad_norm"] == pytest.approx(float(expected), rel=1e-4)


def test_microbatches_do_not_change_the_gradient(two_layer_policy: str) -> None:
    whole = make_trainer(two_layer_policy)
    parts = make_trainer(two_layer_policy, tokens_per_microbatch=64)
    expected = whole.step(BATCH)
    found = parts.step(BATCH)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_rows_without_advantage_weigh_in_the_mean_and_the_metrics_and_have_no_gradient(
    two_layer_policy: str,
) -> None:
    batch = make_batch(grouped_rows(4, 4), logprob=-4.0, group_size=4, equal=8)
    trainer = make_trainer(two_layer_policy)
    found = trainer.step(batch)
    rows = read_rows(batch)
    network = Network(two_layer_policy)
    losses = []
    for microbatch in pack(rows, Packing(8192)):
        logprobs, _ = network.scores(microbatch)
        old = microbatch.logprobs
        advantages = microbatch.advantages
        losses.append(Clip()(Tokens(logprobs, old, advantages, microbatch.row, len(microbatch.numbers))))
    loss = torch.cat(losses)
    loss.mean().backward()
    gradients = [p.grad for p in network.model.parameters() if p.grad is not None]
    assert found["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-4)
    assert found["tokens"] == loss.numel()
    assert found["zero_advantage_share"] == 0.5
    assert found["loss"] == pytest.approx(loss.mean().item(), rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"minibatches": 2},
        # what makes advantages and weights in the step
        {"weights": ["surprising"], "loss": {"ratio_to": "step_start", "correction": {}}},
        {"loss": {"mean_over": "session"}},
    ],
    ids=str,
)
def test_rows_that_do_not_train_have_no_effect_on_the_step(
    two_layer_policy: str, settings: dict[str, object]
) -> None:
    batch = make_batch(grouped_rows(4, 8), logprob=-4.0, group_size=8)
    trains = [place % 8 not in (2, 3, 5) for place in range(len(batch))]
    decisions = pa.array(["train" if does else "not_extreme" for does in trains])
    place = batch.schema.get_field_index("decision")
    whole = make_trainer(two_layer_policy, **settings)
    alone = make_trainer(two_layer_policy, **settings)
    found = whole.step(batch.set_column(place, "decision", decisions))
    expected = alone.step(batch.filter(pa.array(trains)))
    # rewards are those of all that was sampled; times differ
    others = {"reward_mean", "reward_std", "seconds", "cpu_seconds"}
    assert {name: value for name, value in found.items() if name not in others} == {
        name: value for name, value in expected.items() if name not in others
    }
    assert found["reward_mean"] == pytest.approx(np.mean(batch["reward"].to_numpy()))
    weights = whole.weights()
    same = alone.weights()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_a_step_in_which_no_row_teaches_anything_is_the_same_after_a_checkpoint(
    two_layer_policy: str, tmp_path: Path
) -> None:
    nothing = make_batch(grouped_rows(4, 4), logprob=-4.0, group_size=4, equal=16)
    straight = make_trainer(two_layer_policy)
    resumed = make_trainer(two_layer_policy)
    straight.step(BATCH)
    straight.save_checkpoint(str(tmp_path / "checkpoint"))
    straight.await_checkpoint()
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    assert straight.step(nothing)["grad_norm"] == resumed.step(nothing)["grad_norm"] == 0.0
    expected = straight.weights()
    weights = resumed.weights()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
