"""What a teacher teaches in a train step, against its definition: each row by itself, by transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from sf_core.config import TrainConfig
from sf_core.config.run_config import DtypeName
from sf_core.training.packing.rows import read_rows
from sf_core.training.torch.ranks import Ranks, SingleRank
from sf_core.training.torch.teaching import FrozenModels, Name
from sf_core.training.torch.torch_model import AdapterVersionModel, FrozenModel, TorchModel
from sf_core.training.torch.trained_model import DistributedModel, TrainedModel
from sf_core.training.torch.trainer import ModelTrainer
from storage.tensors.checkpoints import EXP_AVG, MASTER
from storage.tensors.weights import load_weights
from tests.bench import training
from tests.bench.training import adapters, gang

TEMPERATURE = 0.8

SAID: dict[str, dict[str, Any]] = {
    "reverse": {"coefficient": 0.5},
    "forward": {"divergence": "forward", "coefficient": 2.0},
    "sampled": {"divergence": "sampled", "coefficient": 0.5},
    "sampled, discounted": {"divergence": "sampled", "discount": 0.5},
}


def drawn(seed: int = 0, *, teaches: bool = False) -> pa.Table:
    """Groups with shared prompts and weights, as the filter stores them; unless it `teaches`, with
    `train.advantage: none`."""
    random = np.random.default_rng(seed)
    rows = training.batches.grouped_rows(3, 4, prompt=4)
    batch = training.batches.make_batch(
        rows, logprob=-4.0, group_size=4, seed=seed, sampling=(TEMPERATURE, 1.0, 0)
    )
    columns = {"weights": [random.choice([0.5, 1.0, 2.0], len(ids)).tolist() for ids, _ in rows]}
    if not teaches:
        columns["advantages"] = [[0.0] * len(ids) for ids, _ in rows]
    for name, values in columns.items():
        index = batch.schema.get_field_index(name)
        kind = batch.schema.field(name).type
        batch = batch.set_column(index, name, pa.array(values, kind))
    return batch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models by name: policies of two architectures, and a teacher of another width and vocabulary."""
    root = tmp_path_factory.mktemp("models")
    makes: dict[str, Any] = {
        "lean": training.policies.llama,
        "transformers": training.policies.neox,
        "teacher": partial(training.policies.qwen, hidden_size=48, vocab_size=80),
    }
    for seed, (name, make) in enumerate(makes.items()):
        torch.manual_seed(seed)
        make().save_pretrained(root / name)
    adapters.draw_adapter(adapters.adapter_of(str(root / "lean")), str(root / "lean"))
    adapters.draw_adapter(adapters.adapter_of(str(root / "teacher")), str(root / "lean"), seed=1)
    return {name: str(root / name) for name in makes}


def make_trainer(
    policy: str,
    teacher: str,
    said: dict[str, Any],
    ranks: Ranks,
    *,
    dtype: DtypeName = "float32",
    stands_in: bool = False,
    **settings: Any,
) -> ModelTrainer:
    """`stands_in`: an adapter of the policy is trained, and that of the teacher stands in for it."""

    def load(name: Name, trained: TrainedModel) -> tuple[DistributedModel, str]:
        if stands_in:
            assert isinstance(trained, TorchModel)
            return AdapterVersionModel(trained, load_weights(adapters.adapter_of(teacher))), ""
        return FrozenModel(str(name), ranks, dtype=dtype), "a digest"

    # with so little memory of the past and no bound, the first moment is the gradient
    plain = {"betas": (0.0, 0.95), "max_grad_norm": 1e9, "loss": {"policy": "plain"}, "advantage": "none"}
    given = {"teacher": {"model": teacher, **said}, "learning_rate": 1e-2}
    return ModelTrainer(
        partial(TorchModel, policy, dtype=dtype, adapter=adapters.adapter_of(policy) if stands_in else None),
        TrainConfig.model_validate(plain | given | settings),
        seed=0,
        ranks=ranks,
        dtype=dtype,
        frozen=FrozenModels(load),
    )


def read_parts(trainer: ModelTrainer, part: str, ranks: Ranks) -> dict[str, Any]:
    slices = {key.partition("/")[2]: one for key, one in trainer.model.slices([part]).items()}
    return {key: one.numpy().copy() for key, one in ranks.collect(slices, torch.float32).items()}


def learn(policy: str, teacher: str, ranks: Ranks, **settings: Any) -> dict[str, Any]:
    """The gradient, and the metric, of each way to teach."""
    found = {}
    for name, said in SAID.items():
        trainer = make_trainer(policy, teacher, said, ranks, **settings)
        metrics = trainer.step(drawn())
        found[name] = {**read_parts(trainer, EXP_AVG, ranks), "teacher_kl": np.array(metrics["teacher_kl"])}
    return found


def assert_close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    largest = max(np.abs(gradient).max() for gradient in wanted.values())
    for name, gradient in wanted.items():
        # the metric is a difference of log-probs, which are as large as those of an equal distribution
        of_logprobs = 8 * np.finfo(np.float32).eps * math.log(80)
        bound = of_logprobs if name == "teacher_kl" else tolerance * largest
        assert np.abs(found[name] - gradient).max() <= bound, name


def expected(policy: str, teacher: str, said: dict[str, Any], batch: pa.Table) -> dict[str, Any]:
    """The gradient of what the settings say, and the metric, from whole logits of each row alone."""
    student, other = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (policy, teacher))
    settings = TrainConfig.model_validate({"teacher": {"model": teacher, **said}}).teacher
    assert settings is not None
    losses = []
    sizes = []
    measured = []
    for row in read_rows(batch):
        ids = torch.tensor(row.token_ids).long()
        (trained,) = np.nonzero(row.loss_mask)
        logits = [model(ids.unsqueeze(0)).logits[0, trained - 1] / TEMPERATURE for model in (student, other)]
        weights = torch.tensor(row.weights[trained])
        p = logits[0].log_softmax(1)
        q = logits[1][:, : logits[0].shape[1]].detach().log_softmax(1)
        if settings.divergence == "sampled":
            chosen, its = (one.log_softmax(1).gather(1, ids[trained, None])[:, 0] for one in logits)
            gains = (its - chosen).detach().numpy()
            measured.append(-gains)
            for token in range(len(gains) - 2, -1, -1):
                gains[token] += settings.discount * gains[token + 1]
            of_tokens = -torch.tensor(gains) * chosen
            # with scores, weights too are made in the step
            weights = torch.ones(len(gains))
        else:
            above, below = (p, q) if settings.divergence == "reverse" else (q, p)
            of_tokens = (above.exp() * (above - below)).sum(1)
            measured.append(of_tokens.detach().numpy())
        losses.append((settings.coefficient * weights * of_tokens).sum())
        sizes.append(float(weights.sum()))
    (torch.stack(losses).sum() / sum(sizes)).backward()
    gradients = {n: p.grad.numpy() for n, p in student.named_parameters() if p.grad is not None}
    return {**gradients, "teacher_kl": np.array(np.concatenate(measured).mean())}


def test_the_gradient_is_that_of_the_definition(folders: dict[str, str]) -> None:
    found = learn(folders["lean"], folders["teacher"], SingleRank())
    for name, said in SAID.items():
        assert_close(found[name], expected(folders["lean"], folders["teacher"], said, drawn()), 1e-5)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[list[gang.Member]]:
    members = [gang.Member(f"t{i}") for i in range(2)]
    yield members
    for member in members:
        member.end()


@pytest.mark.parametrize("policy", ["lean", "transformers", "adapter"])
def test_packing_and_ranks_make_no_difference(
    folders: dict[str, str], two_ranks: list[gang.Member], tmp_path: Path, policy: str
) -> None:
    """Prefixes that rows share go through both networks once, or every row does alone, and some ranks have no
    row of a microbatch. Of an adapter, other factors teach."""
    stands_in = policy == "adapter"
    pair = folders["lean" if stands_in else policy], folders["teacher"]
    wanted = learn(*pair, SingleRank(), stands_in=stands_in)
    alone = learn(*pair, SingleRank(), stands_in=stands_in, tokens_per_microbatch=64)
    one = gang.Try(str(tmp_path), ("t0", "t1"))
    for member in two_ranks:
        member.sit(one, partial(learn, *pair, stands_in=stands_in, tokens_per_microbatch=64))
    of_two, *_ = [member.report(300.0) for member in two_ranks]
    assert not isinstance(of_two, str), of_two
    for name in SAID:
        assert wanted[name]["teacher_kl"] != 0
        for found in (alone, of_two):
            assert_close(found[name], wanted[name], 2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["lean", "transformers", "adapter"])
def test_the_start_as_teacher_changes_no_bit(folders: dict[str, str], policy: str, dtype: DtypeName) -> None:
    folder = folders["lean" if policy == "adapter" else policy]
    for said in SAID.values():
        trainer = make_trainer(
            folder, folder, said, SingleRank(), dtype=dtype, stands_in=policy == "adapter", minibatches=2
        )
        before = read_parts(trainer, MASTER, SingleRank())
        for seed in range(2):
            metrics = trainer.step(drawn(seed))
            assert metrics["teacher_kl"] == metrics["grad_norm"] == 0
        after = read_parts(trainer, MASTER, SingleRank())
        assert all((after[name] == array).all() for name, array in before.items())


def test_factors_that_stand_in_teach_as_a_model_that_has_them(folders: dict[str, str]) -> None:
    found = learn(folders["lean"], folders["teacher"], SingleRank(), stands_in=True)
    for name, said in SAID.items():
        trainer = make_trainer(folders["lean"], folders["teacher"], said, SingleRank(), stands_in=True)
        other = FrozenModel(folders["lean"], SingleRank(), adapter=adapters.adapter_of(folders["teacher"]))
        trainer._frozen = FrozenModels(lambda *_, other=other: (other, ""))
        trainer.step(drawn())
        gradients = read_parts(trainer, EXP_AVG, SingleRank())
        assert all((found[name][key] == array).all() for key, array in gradients.items())


def test_a_teacher_adds_to_what_rewards_teach(folders: dict[str, str]) -> None:
    def gradient(said: dict[str, Any] | None, *, teaches: bool) -> dict[str, Any]:
        trainer = make_trainer(folders["lean"], folders["teacher"], said or {}, SingleRank())
        if said is None:
            trainer.config = trainer.config.model_copy(update={"teacher": None})
        metrics = trainer.step(drawn(teaches=teaches))
        assert ("teacher_kl" in metrics) == (said is not None)
        return read_parts(trainer, EXP_AVG, SingleRank())

    both, alone = (gradient(SAID["reverse"], teaches=teaches) for teaches in (True, False))
    of_rewards = gradient(None, teaches=True)
    assert_close(both, {name: alone[name] + of_rewards[name] for name in alone}, 1e-5)


@pytest.mark.parametrize("name", ["reverse", "sampled"])
def test_a_number_that_is_not_finite_names_the_session_and_the_row(
    folders: dict[str, str], tmp_path: Path, name: str
) -> None:
    broken = AutoModelForCausalLM.from_pretrained(folders["lean"])
    rows = read_rows(drawn())
    # a token that only one row has
    counts = [sum(token in other.token_ids for other in rows) for token in (row.token_ids[4] for row in rows)]
    number = next(n for n, count in enumerate(counts) if count == 1 and rows[n].length > 4)
    broken.model.embed_tokens.weight.data[rows[number].token_ids[4]] = torch.nan
    broken.save_pretrained(tmp_path)
    place = f"session {rows[number].session}, row {number} of the trained rows"
    sentence = (
        f"^train.teacher gives a number that is not finite for {place}: check the weights of the teacher$"
    )
    trainer = make_trainer(folders["lean"], str(tmp_path), SAID[name], SingleRank())
    with pytest.raises(ValueError, match=sentence):
        trainer.step(drawn())
    # where the policy's own numbers are not finite either, it is the policy that is named
    trainer = make_trainer(str(tmp_path), str(tmp_path), SAID["reverse"], SingleRank())
    with pytest.raises(ValueError, match="training diverged on the way to version 1"):
        trainer.step(drawn())


def test_what_a_teacher_at_a_url_said_is_stored_with_the_batch(folders: dict[str, str]) -> None:
    """Numbers that a model would give teach as the model does."""
    said = SAID["sampled"]
    model = make_trainer(folders["lean"], folders["teacher"], said, SingleRank())
    batch = drawn()
    teacher = AutoModelForCausalLM.from_pretrained(folders["teacher"]).eval()
    logprobs = []
    for row in read_rows(batch):
        ids = torch.tensor(row.token_ids).long()
        (trained,) = np.nonzero(row.loss_mask)
        logits = teacher(ids.unsqueeze(0)).logits[0, trained - 1].detach() / TEMPERATURE
        values = np.zeros(len(ids), np.float32)
        values[trained] = logits.log_softmax(1).gather(1, ids[trained, None])[:, 0]
        logprobs.append(values)
    at_url = {"model": None, "url": "http://teacher:8000", "tokenizer": "folder", **said}
    other = make_trainer(folders["lean"], "", at_url, SingleRank())
    metrics = other.step(batch.append_column("teacher_logprobs", pa.array(logprobs, pa.list_(pa.float32()))))
    assert metrics["teacher_kl"] == pytest.approx(model.step(batch)["teacher_kl"], rel=1e-5)
    assert other.teacher_digest == "" and model.teacher_digest == "a digest"
    wanted = read_parts(model, EXP_AVG, SingleRank())
    assert_close(read_parts(other, EXP_AVG, SingleRank()), wanted, 1e-5)
    # a later attempt may have a teacher that is held, and then it is that one
    for kind, correction in (("sampled", None), ("reverse", {})):
        settings: dict[str, Any] = {"loss": {"policy": "plain", "correction": correction}}
        given = (folders["lean"], folders["teacher"], {"divergence": kind}, SingleRank())
        found, wanted_metrics = (
            make_trainer(*given, **settings).step(one)["teacher_kl"]
            for one in (batch.append_column("teacher_logprobs", batch["logprobs"]), batch)
        )
        assert found == wanted_metrics
    with pytest.raises(
        ValueError, match="stored without the log-probs of the teacher at http://teacher:8000"
    ):
        other.step(batch)


def test_what_an_attempt_left_to_its_train_step_is_made_by_the_next(folders: dict[str, str]) -> None:
    """A batch is stored without advantages for a sampled divergence; then the settings name another."""
    batch = drawn(teaches=True)
    place = batch.schema.get_field_index("advantages")
    kind = batch.schema.field("advantages").type
    batch = batch.set_column(place, "advantages", pa.nulls(len(batch), kind))
    for said in SAID["sampled"], SAID["reverse"]:
        trainer = make_trainer(folders["lean"], folders["teacher"], said, SingleRank(), advantage="group")
        assert trainer.step(batch)["zero_advantage_share"] == 0
