"""The contract of model backends, compared with transformers' own forward pass over each row by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.engines.torch.transformers_model import unmap_params
from sf_core.settings import load_object
from sf_core.training.packing.rows import Row, read_rows
from sf_core.training.packing.trie import Packing, share
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.ranks import Ranks, SingleRank
from sf_core.training.torch.trained_model import AdamSettings, TrainedModel
from sf_core.training.torch.trainer import ModelTrainer
from storage.tensors.checkpoints import EXP_AVG, MASTER
from tests.bench.closeness import BACKWARD, FORWARD, assert_gradients, assert_rounded
from tests.bench.training.batches import grouped_rows, make_batch
from tests.bench.training.gang import Member, Try
from tests.bench.training.policies import CONTEXT, VOCABULARY

# with so little memory of the past and no bound, the first moment is the gradient
PLAIN = AdamSettings(learning_rate=1e-3, betas=(0.0, 0.95), weight_decay=0.0, max_grad_norm=1e9)
HEADS_OF_THEIR_OWN = ("phi", "granite")
"""Architectures whose logits are more than hidden states times a weight."""
SAMPLINGS = ((1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.9, 0), (1.0, 1.0, 7), (0.8, 0.8, 20), (0.0, 0.5, 3))


@dataclass(frozen=True)
class Setup:
    """How the ranks make their model."""

    backend: str
    folder: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Sections of the run's configuration."""
    adapter: str | None = None
    """Folder of the adapter that is trained."""

    def model(self, ranks: Ranks, *, values: bool = False) -> TrainedModel:
        backend: TorchBackend = load_object(self.backend)(WorkerDevice())
        config = RunConfig.model_validate(self.settings)
        return backend.make_model(config, self.folder, ranks, "cpu", values=values, adapter=self.adapter)

    def trainer(self, ranks: Ranks) -> ModelTrainer:
        config = RunConfig.model_validate(self.settings)
        return ModelTrainer(self.model, config.train, seed=0, ranks=ranks, dtype=config.policy.dtype_name)


@dataclass(frozen=True)
class Learnt:
    """What one pass over rows gives; each trained token's values are in the order of the rows' tokens."""

    logprobs: list[float]
    entropies: list[float]
    gradients: dict[str, Any]
    grad_norm: float


def learn(setup: Setup, batch: pa.Table, max_tokens: int, ranks: Ranks, entropy: float = 0.0) -> Learnt:
    """`entropy`: weight of the entropies in the loss."""
    model = setup.model(ranks)
    scores: list[tuple[list[float], list[float]]] = []

    def loss(microbatch: Any, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        scores.append((logprobs.tolist(), entropies.tolist()))
        loss = -(logprobs * microbatch.advantages).sum()
        return loss + entropy * (entropies * microbatch.advantages).sum() if entropy else loss

    own = share(read_rows(batch), model.share, model.num_shares, Packing(max_tokens))
    model.forward_backward(own, loss)
    given = ranks.gather(scores if model.measures else [])
    grad_norm = model.update(PLAIN)
    slices = {name.removeprefix(f"{EXP_AVG}/"): one for name, one in model.slices([EXP_AVG]).items()}
    whole = ranks.collect(slices, torch.float32)
    stored = model.as_stored(whole) if ranks.rank == 0 else {}
    logprobs, entropies = ([x for of_rank in given for one in of_rank for x in one[i]] for i in (0, 1))
    return Learnt(logprobs, entropies, {name: t.numpy() for name, t in stored.items()}, grad_norm)


def learn_values(setup: Setup, batch: pa.Table, max_tokens: int, ranks: Ranks) -> Any:
    """The weights that make values of hidden states after a step from zero, and the gradients of the next
    one, by parameter."""
    model = setup.model(ranks, values=True)

    def loss(microbatch: Any, values: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (values - microbatch.advantages).square().sum()

    def whole(part: str) -> dict[str, Any]:
        slices = {name.removeprefix(f"{part}/"): one for name, one in model.slices([part]).items()}
        return {name: tensor.numpy().copy() for name, tensor in ranks.collect(slices, torch.float32).items()}

    own = share(read_rows(batch), model.share, model.num_shares, Packing(max_tokens))
    model.forward_backward(own, loss)
    model.update(PLAIN)
    weights = whole(MASTER).get("value_head")
    model.forward_backward(own, loss)
    model.update(PLAIN)
    return weights, whole(EXP_AVG)


def expected_of_values(folder: str, batch: pa.Table, weights: npt.NDArray[Any]) -> dict[str, Any]:
    """The gradients of `learn_values`, computed by transformers for each row alone."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    head = torch.from_numpy(weights).requires_grad_()
    for row in read_rows(batch):
        ids = torch.tensor(row.token_ids).long()
        (trained,) = np.nonzero(row.loss_mask)
        hidden = model(ids.unsqueeze(0), output_hidden_states=True).hidden_states[-1][0, trained - 1]
        (hidden @ head - torch.tensor(row.advantages[trained])).square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: gradient.numpy() for name, gradient in {**gradients, "value_head": head.grad}.items()}


def train_on(
    setup: Setup, batches: Sequence[pa.Table], checkpoint: str, save: int | None, ranks: Ranks
) -> Any:
    """Weights by name after a step on each batch: going on from the checkpoint, or storing it after so many
    steps."""
    trainer = setup.trainer(ranks)
    if save is None:
        trainer.load_checkpoint(checkpoint)
    for batch in batches[trainer.version :]:
        trainer.step(batch)
        if trainer.version == save:
            trainer.save_checkpoint(checkpoint)
            trainer.await_checkpoint()
    return as_arrays(trainer)


def as_arrays(trainer: ModelTrainer) -> dict[str, Any]:
    return {name: tensor.float().numpy() for name, tensor in trainer.weights().items()}


def weights(setup: Setup, ranks: Ranks) -> dict[str, Any]:
    return as_arrays(setup.trainer(ranks))


def varied_rows(samplings: Sequence[tuple[float, float, int]] = SAMPLINGS) -> pa.Table:
    """Groups with shared prompts, one row of a single trained token and one of the whole context, drawn in
    every way in which engines draw."""
    random = np.random.default_rng(2)
    tables = []
    for i, sampling in enumerate(samplings):
        rows = grouped_rows(1, 3, prompt=4, vocabulary=VOCABULARY)
        prompt = random.integers(VOCABULARY, size=4).tolist()
        rows = [
            (prompt + random.integers(VOCABULARY, size=len(ids) - 4).tolist(), mask) for ids, mask in rows
        ]
        rows += [([i, 5], [False, True])] if i == 1 else []
        if i == 2:
            rows.append(
                (random.integers(VOCABULARY, size=CONTEXT).tolist(), [False] + [True] * (CONTEXT - 1))
            )
        tables.append(make_batch(rows, logprob=-4.0, seed=i, group_size=len(rows), sampling=sampling))
    return pa.concat_tables(tables)


def expected(model: Any, batch: pa.Table, entropy: float = 0.0) -> Learnt:
    """The same by a model of transformers, row by row."""
    logprobs = []
    entropies = []
    losses = []
    for row in sorted(read_rows(batch), key=lambda row: row.token_ids.tolist()):
        own, uncertainty = _row_scores(model, row)
        logprobs += own.tolist()
        entropies += uncertainty.tolist()
        losses.append(((entropy * uncertainty - own) * torch.tensor(row.advantages[row.loss_mask])).sum())
    torch.stack(losses).sum().backward()
    # an expert that no token came to has none
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
    norm = torch.nn.utils.get_total_norm(gradients.values())
    return Learnt(logprobs, entropies, gradients, float(norm))


def expected_logprobs(model: Any, batch: pa.Table) -> list[float]:
    """Of the trained tokens, in the order of `Learnt`."""
    rows = sorted(read_rows(batch), key=lambda row: row.token_ids.tolist())
    return [logprob for row in rows for logprob in _row_scores(model, row)[0].tolist()]


def _row_scores(model: Any, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    (trained,) = np.nonzero(row.loss_mask)
    ids = torch.tensor(row.token_ids).long()
    logits = model(ids.unsqueeze(0)).logits[0, trained - 1].float()
    scores = []
    entropies = []
    for place, token in enumerate(trained):
        temperature, top_p, top_k = row.sampling[token]
        if temperature == 0:
            temperature = 1
            top_p = 1
            top_k = 0
        own = logits[place] / float(temperature)
        everything = own.log_softmax(0)
        # top-k first, then top-p of what is left
        ranked = own.sort(descending=True).values[: int(top_k) or len(own)]
        shares = ranked.softmax(0)
        lowest = ranked[shares.cumsum(0) - shares < float(top_p)].min()
        # what another policy drew widens what this one draws from
        kept = own.masked_fill(own < torch.minimum(lowest, own[ids[token]]), -torch.inf)
        scores.append(kept.log_softmax(0)[ids[token]])
        entropies.append(-(everything.exp() * everything).sum())
    return torch.stack(scores), torch.stack(entropies)


def _cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    return float((a * b).sum() / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12)) if b.any() else 1.0


class ModelTests:
    backend: str
    """Reference to the TorchBackend."""
    layouts: Sequence[tuple[int, dict[str, Any]]]
    """Numbers of ranks, each with settings of `train`."""
    gradient_roundings: float = BACKWARD
    """Largest difference of a gradient (tests/bench/closeness.py)."""

    @pytest.fixture(scope="class")
    @classmethod
    def gang(cls) -> Iterator[list[Member]]:
        members = [Member(f"t{number}") for number in range(max(size for size, _ in cls.layouts))]
        yield members
        for member in members:
            member.end()

    @pytest.fixture(autouse=True)
    def _with(self, gang: list[Member], tmp_path: Path) -> None:
        self.members = gang
        self.tmp_path = tmp_path
        self.tries = 0

    def setup(self, folder: str, **train: Any) -> Setup:
        policy = {"model": folder, "dtype": train.pop("dtype", "float32")}
        return Setup(self.backend, folder, {"policy": policy, "train": train})

    def stored(self, folder: str) -> dict[str, torch.Tensor]:
        """What is trained, as it was stored before."""
        return load_file(f"{folder}/model.safetensors")

    def expected(
        self, folder: str, batch: pa.Table, dtype: torch.dtype = torch.float32, entropy: float = 0.0
    ) -> Learnt:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        found = expected(model, batch, entropy)
        stored = unmap_params(model, found.gradients)
        return replace(found, gradients={name: tensor.float().numpy() for name, tensor in stored.items()})

    def on(self, size: int, work: Callable[[Ranks], Any]) -> Any:
        """What rank 0 of so many returns."""
        gang = self.members[:size]
        one = Try(str(self.tmp_path), tuple(member.worker for member in gang), iteration=self.tries)
        self.tries += 1
        for member in gang:
            member.sit(one, work)
        found, *others = [member.report() for member in gang]
        assert not any(isinstance(report, str) for report in (found, *others)), (found, *others)
        return found

    def test_scores_and_gradients_are_those_of_every_row_by_itself(self, policy: str) -> None:
        batch = varied_rows()
        # all at once, and in as many pieces as there may be
        for max_tokens, entropy in ((1 << 20, 0.0), (64, 0.5)):
            wanted = self.expected(policy, batch, entropy=entropy)
            for size, train in self.layouts:
                setup = self.setup(policy, **train)
                found = self.on(size, partial(learn, setup, batch, max_tokens, entropy=entropy))
                self.check(found, wanted)

    def test_a_rank_without_a_row_computes_along(self, policy: str) -> None:
        batch = make_batch(grouped_rows(1, 1, vocabulary=VOCABULARY), logprob=-4.0)
        wanted = self.expected(policy, batch)
        for size, train in self.layouts:
            self.check(self.on(size, partial(learn, self.setup(policy, **train), batch, 64)), wanted)

    def test_in_bfloat16_it_computes_as_transformers_does_and_keeps_its_weights_in_float32(
        self, policy: str
    ) -> None:
        # where a token is cut off or not, rounding makes a great difference
        batch = varied_rows([(1.0, 1.0, 0)] * 3)
        wanted = self.expected(policy, batch, torch.bfloat16)
        exact = self.expected(policy, batch)
        stored = self.stored(policy)
        for size, train in self.layouts:
            setup = self.setup(policy, dtype="bfloat16", **train)
            found = self.on(size, partial(learn, setup, batch, 1 << 20))
            assert 0 < np.abs(np.subtract(found.logprobs, exact.logprobs)).max() < 0.1
            assert np.abs(np.subtract(found.logprobs, wanted.logprobs)).mean() < 0.01
            assert found.grad_norm == pytest.approx(exact.grad_norm, rel=0.02)
            for name, gradient in found.gradients.items():
                assert gradient.dtype == np.float32 and _cosine(gradient, exact.gradients[name]) > 0.99, name
            published = self.on(size, partial(weights, setup))
            for name, array in published.items():
                assert (array == stored[name].bfloat16().float().numpy()).all(), name

    def check(self, found: Learnt, wanted: Learnt) -> None:
        assert_rounded(found.logprobs, wanted.logprobs, FORWARD)
        assert_rounded(found.entropies, wanted.entropies, FORWARD)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
        wanted_of = {name: wanted.gradients[name] for name in found.gradients}
        assert_gradients(found.gradients, wanted_of, self.gradient_roundings)

    def test_weights_come_out_as_they_went_in(self, policy: str) -> None:
        stored = self.stored(policy)
        for size, train in self.layouts:
            found = self.on(size, partial(weights, self.setup(policy, **train)))
            assert found.keys() == stored.keys()
            for name, array in found.items():
                assert (array == stored[name].numpy()).all(), name

    def test_the_same_ranks_make_the_same_bits_also_after_a_checkpoint_and_others_nearly_the_same(
        self, policy: str
    ) -> None:
        batches = [make_batch(grouped_rows(4, 3), logprob=-4.0, group_size=3, seed=seed) for seed in range(3)]
        first: dict[str, Any] = {}
        for number, (size, train) in enumerate(self.layouts):
            train = train | {"learning_rate": 1e-4, "minibatches": 2, "tokens_per_microbatch": 64}
            setup = self.setup(policy, **train)
            folder = str(self.tmp_path / f"checkpoint-{number}")
            straight = self.on(size, partial(train_on, setup, batches, folder, 2))
            for again in (
                self.on(size, partial(train_on, setup, batches, folder, None)),
                self.on(size, partial(train_on, setup, batches, f"{folder}-again", 2)),
            ):
                for name, array in straight.items():
                    assert (again[name] == array).all(), name
            first = first or straight
            for name, array in straight.items():
                np.testing.assert_allclose(array, first[name], atol=2e-5, err_msg=name)

    def test_other_ranks_go_on_from_a_checkpoint(self, policy: str) -> None:
        batches = [make_batch(grouped_rows(2, 3), logprob=-4.0, group_size=3, seed=seed) for seed in range(2)]
        for writer, write_as in self.layouts:
            folder = str(self.tmp_path / f"written-by-{writer}-{sorted(write_as.items())}")
            whole = self.on(writer, partial(train_on, self.setup(policy, **write_as), batches, folder, 2))
            for reader, read_as in self.layouts:
                found = self.on(
                    reader, partial(train_on, self.setup(policy, **read_as), batches, folder, None)
                )
                for name, array in whole.items():
                    assert (found[name] == array).all(), (writer, reader, name)


class FullModelTests(ModelTests):
    """Of backends that train all weights, and with them a critic."""

    def test_a_critic_has_the_gradient_of_its_values(self, policy: str) -> None:
        batch = varied_rows()
        setup = self.setup(policy)
        if (
            json.loads(Path(policy, "config.json").read_text(encoding="utf-8"))["model_type"]
            in HEADS_OF_THEIR_OWN
        ):
            with pytest.raises(ValueError, match=r"train\.critic does not support model_type"):
                setup.model(SingleRank(), values=True)
            return
        for size, train in self.layouts:
            of_layout = self.setup(policy, **train)
            weights, found = self.on(size, partial(learn_values, of_layout, batch, 64))
            assert_gradients(found, expected_of_values(policy, batch, weights), self.gradient_roundings)
