"""What a step teaches, against its definition: each row by itself, by transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from sf_core.config import PolicyConfig, TrainConfig
from sf_core.models.builtin import make_policy
from sf_core.recipes.losses import LossConfig, Tokens
from sf_core.training.packing.rows import Row, read_rows
from sf_core.training.torch.ranks import Ranks, SingleRank
from sf_core.training.torch.teaching import FrozenModels
from sf_core.training.torch.torch_model import FrozenModel, TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from storage.tensors.checkpoints import EXP_AVG
from tests.bench.training import batches, gang

TEMPERATURE = 0.8

FORMULAS: dict[str, dict[str, Any]] = {
    "clip, token": {"policy": {"low": 0.1, "high": 0.3, "cap": 2.0}},
    "dual, session": {"policy": {"cap": 2.0, "beyond": "dual"}, "mean_over": "session"},
    "sequence_clip, group": {
        "policy": {"kind": "sequence_clip", "low": 0.3, "high": 0.3},
        "mean_over": "group",
    },
    "cispo, constant": {"policy": "cispo", "mean_over": "constant", "session_tokens": 9},
    "plain, k3": {"policy": "plain", "kl": {"coefficient": 0.3}},
    "clip, k1": {"kl": {"coefficient": 0.3, "estimator": "k1"}, "mean_over": "session"},
    "clip, k2": {"kl": {"coefficient": 0.3, "estimator": "k2"}, "mean_over": "group"},
    "clip, entropy": {"entropy": 0.2},
    "decoupled": {"ratio_to": "step_start", "correction": {"cap": 1.5}},
    "masked rows": {"policy": "plain", "correction": {"cap": 1.5, "beyond": "mask", "level": "row"}},
    "m2po": {"policy": {"kind": "m2po", "budget": 0.2}},
    "all": {
        "policy": {"kind": "sequence_clip"},
        "mean_over": "session",
        "ratio_to": "step_start",
        "correction": {"cap": 1.5, "level": "row"},
        "kl": {"coefficient": 0.3},
        "entropy": 0.1,
    },
}


@pytest.fixture(scope="module")
def policy_and_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The policy and the reference."""
    root = tmp_path_factory.mktemp("policies")
    for seed, name in enumerate(("policy", "reference")):
        make_policy(str(root / name), PolicyConfig(hidden_size=32, num_layers=2), seed)
    return str(root / "policy"), str(root / "reference")


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[list[gang.Member]]:
    members = [gang.Member(f"t{i}") for i in range(3)]
    yield members
    for member in members:
        member.end()


def drawn() -> pa.Table:
    """Groups with shared prompts and holes in what is trained, sessions of two branches, rows that teach
    nothing, and weights."""
    random = np.random.default_rng(3)
    rows = [
        (ids, [sampled and (i == len(ids) - 1 or random.random() < 0.8) for i, sampled in enumerate(mask)])
        for ids, mask in batches.grouped_rows(3, 4, prompt=4)
    ]
    batch = batches.make_batch(rows, group_size=4, branches=2, sampling=(TEMPERATURE, 1.0, 0))
    columns = {
        "logprobs": [[float(random.uniform(-6, -4)) if s else None for s in mask] for _, mask in rows],
        "weights": [random.choice([0.5, 1.0, 2.0], len(ids)).tolist() for ids, _ in rows],
        "advantages": [
            [0.0 if n in (1, 6) else float(random.normal())] * len(ids) for n, (ids, _) in enumerate(rows)
        ],
    }
    for name, values in columns.items():
        kind = batch.schema.field(name).type
        batch = batch.set_column(batch.schema.get_field_index(name), name, pa.array(values, kind))
    return batch


def config_of(loss: dict[str, Any], **settings: Any) -> TrainConfig:
    # with so little memory of the past and no bound, the first moment is the gradient
    plain = {"betas": (0.0, 0.95), "max_grad_norm": 1e9, "loss": loss}
    return TrainConfig.model_validate(plain | settings)


def gradients(
    policy: str, reference: str, formulas: dict[str, dict[str, Any]], max_tokens: int, ranks: Ranks
) -> dict[str, dict[str, Any]]:
    """Gradient of each formula by the trainer, by parameter; on rank 0."""
    found = {}
    for name, loss in formulas.items():
        trainer = ModelTrainer(
            partial(TorchModel, policy),
            config_of(loss, tokens_per_microbatch=max_tokens),
            seed=0,
            ranks=ranks,
            frozen=FrozenModels(lambda *_: (FrozenModel(reference, ranks), "")),
        )
        trainer.step(drawn())
        slices = {key.partition("/")[2]: one for key, one in trainer.model.slices([EXP_AVG]).items()}
        found[name] = {key: one.numpy() for key, one in ranks.collect(slices, torch.float32).items()}
    return found


def scores(model: Any, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the trained tokens of a row."""
    ids = torch.from_numpy(row.token_ids.copy()).long()
    (trained,) = np.nonzero(row.loss_mask)
    logprobs = (model(ids.unsqueeze(0)).logits[0, trained - 1] / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(1, ids[trained].unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(1)


def expected_gradient(policy: str, reference: str, loss: LossConfig) -> dict[str, Any]:
    """The gradient of a loss, computed from its definition for each row alone."""
    model, other = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (policy, reference))
    rows = read_rows(drawn())
    every = [(row, *scores(model, row), scores(other, row)[0].detach()) for row in rows]
    behaviour = [torch.from_numpy(row.logprobs[row.loss_mask]) for row in rows]
    advantages = [torch.from_numpy(row.advantages[row.loss_mask]) for row in rows]
    log_ratios = torch.cat([new.detach() - old for (_, new, _, _), old in zip(every, behaviour, strict=True)])
    formula = loss.policy.fit(log_ratios.double().numpy(), torch.cat(advantages).double().numpy())
    parts: dict[str, list[tuple[torch.Tensor, float]]] = {}
    for (row, new, entropy, ref), old, advantage in zip(every, behaviour, advantages, strict=True):
        start = new.detach()
        weights = torch.from_numpy(row.weights[row.loss_mask])
        ratio_to = start if loss.ratio_to == "step_start" else old
        of_tokens = formula(Tokens(new, ratio_to, advantage, torch.zeros(len(new), dtype=torch.long), 1))
        if (correction := loss.correction) is not None:
            factor = (
                (start - old).sum().expand(len(new)).exp()
                if correction.level == "row"
                else (start - old).exp()
            )
            limit = 0.0 if correction.beyond == "mask" else correction.cap
            of_tokens = of_tokens * torch.where(factor > correction.cap, limit, factor)
        if loss.kl is not None:
            d = new - ref
            k = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[loss.kl.estimator]
            of_tokens = of_tokens + loss.kl.coefficient * k
        of_tokens = (of_tokens - loss.entropy * entropy) * weights
        unit = {"session": row.session, "group": row.group, "constant": row.session}.get(
            loss.mean_over, "all"
        )
        parts.setdefault(unit, []).append((of_tokens.sum(), float(weights.sum())))
    sums = [(torch.stack([s for s, _ in part]).sum(), sum(n for _, n in part)) for part in parts.values()]
    means = [s / (loss.session_tokens or n) for s, n in sums]
    torch.stack(means).mean().backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    largest = max(np.abs(gradient).max() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert np.abs(found[name] - gradient).max() <= tolerance * largest, name


@pytest.mark.parametrize("name", FORMULAS)
def test_the_gradient_is_that_of_the_definition(policy_and_reference: tuple[str, str], name: str) -> None:
    loss = config_of(FORMULAS[name]).loss
    found = gradients(*policy_and_reference, {name: FORMULAS[name]}, 8192, SingleRank())[name]
    assert_close(found, expected_gradient(*policy_and_reference, loss), 1e-5)


LOSSES: list[dict[str, Any]] = [
    {"kind": "clip", "cap": 2.0},
    {"kind": "clip", "cap": 2.0, "beyond": "dual"},
    {"kind": "sequence_clip", "low": 0.3, "high": 0.3},
    {"kind": "cispo"},
    {"kind": "m2po", "budget": 0.2},
    {"kind": "plain"},
]
MEANS: list[dict[str, Any]] = [
    *({"mean_over": over} for over in ("token", "session", "group")),
    {"mean_over": "constant", "session_tokens": 9},
]
PENALTIES: list[dict[str, Any]] = [
    {},
    *({"kl": {"coefficient": 0.3, "estimator": estimator}} for estimator in ("k1", "k2", "k3")),
]
COMBINATIONS = {
    str(parts): {"policy": parts[0], **parts[1], **parts[2]} for parts in product(LOSSES, MEANS, PENALTIES)
}


@pytest.mark.parametrize(
    "formulas", [FORMULAS, pytest.param(COMBINATIONS, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_packing_and_ranks_make_no_difference(
    policy_and_reference: tuple[str, str],
    three_ranks: list[gang.Member],
    tmp_path: Path,
    formulas: dict[str, dict[str, Any]],
) -> None:
    wanted = gradients(*policy_and_reference, formulas, 8192, SingleRank())
    for max_tokens in (128, 64):
        found = gradients(*policy_and_reference, formulas, max_tokens, SingleRank())
        for name in formulas:
            assert_close(found[name], wanted[name], 2e-6)
    for size in (2, 3):
        workers = tuple(member.worker for member in three_ranks[:size])
        one = gang.Try(str(tmp_path), workers, iteration=size)
        for member in three_ranks[:size]:
            member.sit(one, partial(gradients, *policy_and_reference, formulas, 64))
        found, *_ = [member.report(300.0) for member in three_ranks[:size]]
        assert not isinstance(found, str), found
        for name in formulas:
            assert_close(found[name], wanted[name], 2e-6)


def test_advantages_and_weights_that_need_scores_are_made_in_the_step(
    policy_and_reference: tuple[str, str],
) -> None:
    """The half of the tokens with the highest entropy, with advantages from the rewards."""
    settings = {"weights": [{"kind": "surprising", "share": 0.5}], "advantage": {"scale": "none"}}
    trainer = ModelTrainer(
        partial(TorchModel, policy_and_reference[0]), config_of({"policy": "plain"}, **settings), seed=0
    )
    batch = drawn()
    for name in ("advantages", "weights"):
        nothing = pa.nulls(len(batch), batch.schema.field(name).type)
        batch = batch.set_column(batch.schema.get_field_index(name), name, nothing)
    rewards = np.repeat(np.arange(6.0), 2)
    batch = batch.set_column(batch.schema.get_field_index("reward"), "reward", pa.array(rewards))
    metrics = trainer.step(batch)
    model = AutoModelForCausalLM.from_pretrained(policy_and_reference[0]).eval()
    every = [(row, *scores(model, row)) for row in read_rows(batch)]
    least = torch.quantile(torch.cat([entropy for _, _, entropy in every]), 0.5)
    # sessions 0, 1 of the first group have rewards 0 and 1, and so on
    losses = [
        -(0.5 if row.number % 4 >= 2 else -0.5) * logprobs[entropy >= least]
        for row, logprobs, entropy in every
    ]
    torch.cat(losses).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_a_penalty_in_the_reward_moves_advantages_and_has_no_gradient_of_its_own(
    policy_and_reference: tuple[str, str],
) -> None:
    kl = {"coefficient": 0.1, "place": "reward", "estimator": "k1"}
    trainer = ModelTrainer(
        partial(TorchModel, policy_and_reference[0]),
        config_of({"policy": "plain", "kl": kl}, advantage="leave_one_out"),
        seed=0,
        frozen=FrozenModels(lambda *_: (FrozenModel(policy_and_reference[1], SingleRank()), "")),
    )
    batch = drawn()
    metrics = trainer.step(batch)
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder).eval() for folder in policy_and_reference
    )
    rows = read_rows(batch)
    found = [(row, scores(policy, row)[0], scores(reference, row)[0].detach()) for row in rows]
    rewards = dict(zip(batch["session_id"].to_pylist(), batch["reward"].to_pylist(), strict=True))
    first = {}
    for row, reward in zip(rows, batch["reward"].to_pylist(), strict=True):
        first.setdefault(row.session, reward)
    rewards = first
    for row, new, ref in found:
        rewards[row.session] -= 0.1 * float((new.detach() - ref).sum())
    groups = {row.session: row.group for row in rows}
    advantages = {
        s: r - np.mean([o for other, o in rewards.items() if groups[other] == groups[s] and other != s])
        for s, r in rewards.items()
    }
    torch.cat([-advantages[row.session] * new for row, new, _ in found]).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters() if p.grad is not None])
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert metrics["kl_reference"] > 0


def test_without_a_reference_no_divergence_from_one_is_reported(
    policy_and_reference: tuple[str, str],
) -> None:
    metrics = ModelTrainer(partial(TorchModel, policy_and_reference[0]), config_of({}), seed=0).step(drawn())
    assert "kl_reference" not in metrics


# --- the critic

PPO = {"advantage": {"kind": "gae", "lam": 0.9, "whiten": False}, "critic": {"learning_rate": 0.01}}


def ppo_trainer(folder: str, ranks: Ranks, **settings: Any) -> ModelTrainer:
    return ModelTrainer(
        partial(TorchModel, folder),
        TrainConfig.model_validate({"learning_rate": 1e-3, **PPO, **settings}),
        seed=0,
        ranks=ranks,
        make_critic=partial(TorchModel, folder, values=True),
    )


def rewarded() -> pa.Table:
    """Sessions of which every other one earns something."""
    batch = drawn()
    rewards = [float(row // 2 % 2) for row in range(len(batch))]
    return batch.set_column(batch.schema.get_field_index("reward"), "reward", pa.array(rewards))


def checkpointed(folder: str, checkpoint: str, save: int | None, ranks: Ranks) -> dict[str, Any]:
    """All tensors after four steps: going on from a checkpoint, or storing one after so many."""
    trainer = ppo_trainer(folder, ranks, minibatches=2)
    if save is None:
        trainer.load_checkpoint(checkpoint)
    while trainer.version < 4:
        trainer.step(rewarded())
        if trainer.version == save:
            trainer.save_checkpoint(checkpoint)
            trainer.await_checkpoint()
    slices = trainer.state.slices(["master", EXP_AVG])
    return {name: tensor.numpy() for name, tensor in ranks.collect(slices, torch.float32).items()}


def test_a_critic_learns_what_to_expect_and_the_policy_is_published_without_it(
    policy_and_reference: tuple[str, str],
) -> None:
    trainer = ppo_trainer(policy_and_reference[0], SingleRank(), learning_rate=1e-9)
    steps = [trainer.step(rewarded()) for _ in range(25)]
    assert steps[0]["explained_variance"] == pytest.approx(0.0)
    assert steps[-1]["explained_variance"] > 0.5
    assert steps[-1]["value_loss"] < steps[0]["value_loss"] / 2
    plain = ModelTrainer(partial(TorchModel, policy_and_reference[0]), TrainConfig(), seed=0)
    assert trainer.weights().keys() == plain.weights().keys()


def test_with_values_of_zero_the_advantage_of_every_token_is_the_reward(
    policy_and_reference: tuple[str, str],
) -> None:
    trainer = ppo_trainer(
        policy_and_reference[0],
        SingleRank(),
        betas=(0.0, 0.9),
        advantage={"kind": "gae", "lam": 1, "whiten": False},
    )
    batch = rewarded()
    found = trainer.step(batch)["grad_norm"]
    advantages = [
        [reward] * len(ids)
        for reward, ids in zip(batch["reward"].to_pylist(), batch["token_ids"].to_pylist(), strict=True)
    ]
    index = batch.schema.get_field_index("advantages")
    kind = batch.schema.field("advantages").type
    given = batch.set_column(index, "advantages", pa.array(advantages, kind))
    weights = batch.schema.get_field_index("weights")
    given = given.set_column(weights, "weights", pa.nulls(len(batch), kind))
    plain = ModelTrainer(
        partial(TorchModel, policy_and_reference[0]), TrainConfig(betas=(0.0, 0.9)), seed=0
    ).step(given)
    assert found == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_a_critic_goes_on_bit_for_bit_from_a_checkpoint_on_one_rank_and_on_two(
    policy_and_reference: tuple[str, str], three_ranks: list[gang.Member], tmp_path: Path
) -> None:
    wanted = checkpointed(policy_and_reference[0], str(tmp_path / "one"), 2, SingleRank())
    assert any(name.startswith("master/critic.") for name in wanted)
    again = checkpointed(policy_and_reference[0], str(tmp_path / "one"), None, SingleRank())
    two = []
    for iteration, save in enumerate((2, None)):
        one = gang.Try(str(tmp_path), ("t0", "t1"), iteration=10 + iteration)
        for member in three_ranks[:2]:
            member.sit(one, partial(checkpointed, policy_and_reference[0], str(tmp_path / "two"), save))
        found, *_ = [member.report(120.0) for member in three_ranks[:2]]
        assert not isinstance(found, str), found
        two.append(found)
    for name, tensor in wanted.items():
        assert (again[name] == tensor).all() and (two[0][name] == two[1][name]).all(), name
        np.testing.assert_allclose(two[0][name], tensor, atol=1e-4, err_msg=name)
