"""What a train step teaches, made at its beginning: scores of the rows by forward passes, and from them what
advantages, weights and losses need. Not in the engines, so that a stored step can be made again bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sf_core.config import TrainConfig
from sf_core.recipes.advantages import Gae
from sf_core.recipes.losses import LossConfig, PolicyLoss, mean_over
from sf_core.recipes.samples import Samples, Score, Values
from sf_core.recipes.tables import samples_of
from sf_core.recipes.weights import weigh
from sf_core.training.packing.rows import Row
from sf_core.training.packing.trie import Microbatch, share
from sf_core.training.torch.ranks import Ranks
from sf_core.training.torch.trained_model import DistributedModel, TrainedModel, packing_of
from storage.tables.batches import select_training_rows
from storage.tables.parquet import numpy_rows

Name = int | str
"""The name of a model that is not trained: a version of the run, or what `train.teacher.model` says."""

Load = Callable[[Name, TrainedModel], tuple[DistributedModel, str]]
"""(name, the model that is trained) -> the model of that name, held by the same ranks, and the digest of its
files, which versions of the run need not have. The trained model itself may stand in for it."""


def _load_none(name: Name, _: TrainedModel) -> NoReturn:
    raise ValueError(f"this trainer has no frozen models, but training needs {name}")


class FrozenModels:
    """The models of a step that are not trained. Each is loaded when a step first needs it, and stays until
    another one takes its place."""

    def __init__(self, load: Load = _load_none, *, keeps: bool = True) -> None:
        """`keeps`: whether they stay."""
        self._load = load
        self._keeps = keeps
        self._models: dict[str, tuple[Name, DistributedModel, str]] = {}

    def model_of(
        self, role: Literal["reference", "teacher"], name: Name, trained: TrainedModel
    ) -> DistributedModel:
        """The model that has this role in the step."""
        model_of_role = next((entry for entry in self._models.values() if entry[0] == name), None)
        if model_of_role is None:
            # a device may have no room for the one before too
            self._models.pop(role, None)
            model_of_role = (name, *self._load(name, trained))
        if self._keeps:
            self._models[role] = model_of_role
        return model_of_role[1]

    def load(self, name: Name, trained: TrainedModel) -> DistributedModel:
        """The model of this name, which does not stay."""
        return self._load(name, trained)[0]

    def digest_of(self, name: Name) -> str:
        """The digest of a model that is held; empty if it has none."""
        return next((digest for loaded, _, digest in self._models.values() if loaded == name), "")

    def rest(self) -> None:
        for _, model, _ in self._models.values():
            model.rest()

    def wake(self) -> None:
        for _, model, _ in self._models.values():
            model.wake()


def compute_scores(
    rows: Sequence[Row],
    config: TrainConfig,
    model: TrainedModel,
    ranks: Ranks,
    version: int,
    frozen: FrozenModels,
    critic: TrainedModel | None,
    batch: pa.Table,
) -> dict[Score, Values]:
    """The scores of all rows that the configuration needs, the same on every rank; 0 where nothing is
    trained. `version` is the one that the model holds. The batch has those of a teacher at an address. Raises
    ValueError if it has not, or if the teacher's are not finite."""
    needs = config.needs | config.loss.needs
    teacher = config.teacher
    scores: dict[Score, Values] = {}
    if needs & {"start", "entropy"}:
        scores["start"], scores["entropy"] = score_rows(rows, config, model, ranks)
    if "reference" in needs:
        reference = frozen.model_of("reference", config.loss.reference_of(version), model)
        scores["reference"], _ = score_rows(rows, config, reference, ranks)
    if "teacher" in needs and teacher is not None:
        if teacher.url is None:
            teacher_model = frozen.model_of("teacher", teacher.model or 0, model)
            scores["teacher"], _ = score_rows(rows, config, teacher_model, ranks)
        elif "teacher_logprobs" in batch.column_names:
            scores["teacher"] = numpy_rows(select_training_rows(batch)["teacher_logprobs"])
        else:
            raise ValueError(f"the batch was stored without the log-probs of the teacher at {teacher.url}")
    for row, values in zip(rows, scores.get("teacher", ()), strict=False):
        if not np.isfinite(values).all():
            raise teacher_fault(row)
    if "values" in needs and critic is not None:
        scores["values"], _ = score_rows(rows, config, critic, ranks)
    return scores


def teacher_fault(row: Row) -> ValueError:
    """What is raised if a number that the teacher gives for a row is not finite."""
    return ValueError(
        f"train.teacher gives a number that is not finite for session {row.session}, row {row.number} of "
        "the trained rows: check the weights of the teacher"
    )


def score_rows(
    rows: Sequence[Row], config: TrainConfig, model: DistributedModel, ranks: Ranks
) -> tuple[Values, Values]:
    """Log-probs and entropies of all rows."""
    own: dict[int, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = {}

    def collect(microbatch: Microbatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        row_of_token = microbatch.row.cpu().numpy()
        trained_logprobs = logprobs.cpu().numpy()
        trained_entropies = entropies.cpu().numpy()
        for index, number in enumerate(microbatch.numbers):
            mask = row_of_token == index
            own[int(number)] = trained_logprobs[mask], trained_entropies[mask]
        return logprobs.sum()

    microbatches = share(rows, model.share, model.num_shares, packing_of(config, model))
    model.forward(microbatches, collect)
    scores: dict[int, tuple[npt.ArrayLike, npt.ArrayLike]] = {}
    for scores_of_rank in ranks.gather(own if model.measures else {}):
        scores.update(scores_of_rank)
    all_logprobs = []
    all_entropies = []
    for row in rows:
        row_logprobs, row_entropies = scores.get(row.number, (0.0, 0.0))
        all_logprobs.append(_fill_trained(row, row_logprobs))
        all_entropies.append(_fill_trained(row, row_entropies))
    return all_logprobs, all_entropies


def _fill_trained(row: Row, values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Values of the trained tokens at their places in the row, 0 elsewhere."""
    filled = np.zeros(row.token_ids.size, np.float32)
    filled[row.loss_mask] = values
    return filled


def prepare_rows(
    rows: Sequence[Row], batch: pa.Table, scores: Mapping[Score, Values], config: TrainConfig, version: int
) -> list[Row]:
    """The rows with the advantages, weights and log-probs that follow from their scores. They are the
    training rows of the batch, from which the step makes the version after this one."""
    loss = config.loss
    start = scores.get("start")
    weighted_rows = list(rows)
    # an attempt with other settings may have left them to this step
    if config.needs or batch["advantages"].null_count:
        samples = replace(samples_of(select_training_rows(batch), version), scores=scores)
        samples = replace(samples, rewards=samples.rewards - _penalties(samples, loss))
        advantages, weights = weigh(samples, config.advantage, config.weights, config.teacher)
        weighted = zip(weighted_rows, advantages, weights, strict=True)
        weighted_rows = [
            replace(row, advantages=advantage, weights=weight) for row, advantage, weight in weighted
        ]
        if isinstance(config.advantage, Gae):
            predicted = zip(weighted_rows, scores["values"], config.advantage.returns(samples), strict=True)
            weighted_rows = [
                replace(row, values=values, returns=returns) for row, values, returns in predicted
            ]
    if start is not None and loss.correction is not None:
        for i, (row, start_logprobs) in enumerate(zip(weighted_rows, start, strict=True)):
            factors = np.ones(row.token_ids.size, np.float32)
            mask = row.loss_mask
            factors[mask] = loss.correction(start_logprobs[mask], row.logprobs[mask])
            weighted_rows[i] = replace(row, correction=factors)
    if start is not None and loss.ratio_to == "step_start":
        weighted_rows = [replace(row, old=values) for row, values in zip(weighted_rows, start, strict=True)]
    if "reference" in scores:
        pairs = zip(weighted_rows, scores["reference"], strict=True)
        weighted_rows = [replace(row, reference=values) for row, values in pairs]
    return weighted_rows


def _penalties(samples: Samples, loss: LossConfig) -> npt.NDArray[np.float64]:
    """[S] what each session's reward loses to the divergence from the reference."""
    kl = loss.kl
    if kl is None or kl.place != "reward":
        return np.zeros(len(samples.rewards))
    pairs = zip(samples.scores["start"], samples.scores["reference"], strict=True)
    of_tokens = [
        kl(torch.from_numpy(start), torch.from_numpy(reference)).numpy() for start, reference in pairs
    ]
    return np.multiply(kl.coefficient, samples.session_sum(of_tokens), dtype=np.float64)


def fit_policy_loss(rows: Sequence[Row], scores: Mapping[Score, Values], loss: LossConfig) -> PolicyLoss:
    """The policy's part of the loss of a step of these rows, which are prepared."""
    if "start" not in loss.policy.needs:
        return loss.policy
    log_ratios = []
    advantages = []
    for row, start in zip(rows, scores["start"], strict=True):
        mask = row.loss_mask
        old = row.logprobs if row.old is None else row.old
        log_ratios.append((start[mask] - old[mask]).astype(np.float64))
        advantages.append(row.advantages[mask].astype(np.float64))
    return loss.policy.fit(np.concatenate(log_ratios), np.concatenate(advantages))


def weigh_rows(rows: Sequence[Row], loss: LossConfig) -> tuple[list[Row], float]:
    """The rows of an optimiser step with weights such that their sum over tokens, divided by the number that
    is returned, is the mean that the loss is."""
    lengths = np.array([row.weights[row.loss_mask].sum(dtype=np.float64) for row in rows])
    units = None
    if loss.mean_over != "token":
        units = [row.group if loss.mean_over == "group" else row.session for row in rows]
    factors, total = mean_over(lengths, units, loss.session_tokens)
    weighted = []
    for row, factor in zip(rows, factors, strict=True):
        weights = (row.weights * factor).astype(np.float32)
        weighted.append(replace(row, weights=weights))
    return weighted, total or 1.0
