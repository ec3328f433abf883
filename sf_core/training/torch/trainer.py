"""The trainer: a batch in, the next policy version out. Knows no runs, stages or engines, and of a model only
what any of several ranks may do with it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import pyarrow as pa
import torch

from sf_core.config import TrainConfig
from sf_core.config.run_config import DtypeName
from sf_core.engines.torch.loading import free_memory
from sf_core.models.scoring import Target
from sf_core.recipes.losses import PolicyLoss, Tokens
from sf_core.training.packing.rows import Row, read_rows, sampled_by_one_of
from sf_core.training.packing.trie import Microbatch, share, split_groups
from sf_core.training.torch import teaching
from sf_core.training.torch.critic import PolicyAndCritic, explained_variance, train_critic
from sf_core.training.torch.publisher import Background, Publisher
from sf_core.training.torch.ranks import Ranks, SingleRank
from sf_core.training.torch.step_metrics import (
    MEANS,
    batch_metrics,
    divergence,
    summaries,
    teacher_metrics,
    token_metrics,
)
from sf_core.training.torch.trained_model import AdamSettings, Targets, TeacherModel, TrainedModel, packing_of
from storage.files import FileRef
from storage.tensors.checkpoints import MASTER, PARTS, TrainerProgress, load_checkpoint, save_shard

PerToken = dict[str, list[torch.Tensor]]
"""Metrics of every trained token, from each microbatch."""

_COMPARED_TOKENS = 512
"""Tokens of an earlier version that are compared with what engines reported of them, about."""

_ROOM = 2.5
"""Memory for a model that is loaded for that and not trained, in weights of the published dtype."""


class ModelTrainer:
    """Trains a model that starts at version 0.

    Each of several ranks computes on its share of every optimiser step's rows; all of them must call `step`
    with the same batch and the same settings.
    """

    config: TrainConfig
    """The settings of the next step; they may change between steps."""

    def __init__(
        self,
        make_model: Callable[[Ranks], TrainedModel],
        config: TrainConfig,
        *,
        seed: int,
        ranks: Ranks | None = None,
        dtype: DtypeName = "float32",
        frozen: teaching.FrozenModels | None = None,
        make_critic: Callable[[Ranks], TrainedModel] | None = None,
        adapter: bytes = b"",
        base: str = "",
    ) -> None:
        """`dtype`: that of published weights. `frozen`: the models that teach beside the batch. `adapter`:
        the content of `adapter_config.json`, if an adapter alone is trained, and `base` the digest of the
        frozen weights."""
        self.version = 0
        self._frozen = frozen or teaching.FrozenModels()
        self.config = config
        self._seed = seed
        self._ranks: Ranks = ranks or SingleRank()
        self.model = make_model(self._ranks)
        self._critic = None if make_critic is None else make_critic(self._ranks)
        self.state = PolicyAndCritic(self.model, self._critic)
        self._publisher = Publisher(dtype, adapter)
        self._background = Background()
        self._base = base
        self._dtype = getattr(torch, dtype)
        self.device = self.model.device.type
        self._optimizer_steps = self._steps_before = 0

    def step(self, batch: pa.Table) -> dict[str, float]:
        """Train on a batch of storage.tables.batches; returns the metrics of the step, equal on every rank.

        Raises ExchangeError if another rank is gone, or ValueError if the weights would not stay finite;
        the trainer must not be used after that."""
        started = time.perf_counter()
        cpu_started = time.process_time()
        self._steps_before = self._optimizer_steps
        rows, policy_loss, of_teacher = self._prepare_batch(batch)
        random = np.random.default_rng((self._seed, self.version))
        per_token: PerToken = defaultdict(list)
        grad_norms = [
            self._optimise(part, policy_loss, per_token)
            for part in split_groups(rows, self.config.minibatches, random)
        ]
        own = summaries({name: torch.cat(per_token[name]) for name in MEANS if per_token[name]})
        cpu_seconds = time.process_time() - cpu_started
        of_ranks = self._ranks.gather((own, cpu_seconds, self.state.is_finite()))
        if not all(is_finite for _, _, is_finite in of_ranks):
            raise self._divergence("a weight")
        self.version += 1
        return {
            **token_metrics([own for own, _, _ in of_ranks]),
            **of_teacher,
            **batch_metrics(batch, rows),
            **({} if self._critic is None else {"explained_variance": explained_variance(rows)}),
            "grad_norm": float(np.mean(grad_norms)),
            "learning_rate": self._learning_rate,
            "seconds": time.perf_counter() - started,
            "cpu_seconds": sum(cpu_seconds for _, cpu_seconds, _ in of_ranks),
        }

    def compare_engines(self, batch: pa.Table, stored: Collection[int]) -> dict[str, float]:
        """Metrics of how far the log-probs that engines reported of an earlier version are from those that
        its weights give here, if they are among these stored versions. Empty if such a version sampled no
        row by itself, or memory has no room for it. No part of the step: a replay needs neither those weights
        nor the metrics."""
        on_all_ranks = set.intersection(*map(set, self._ranks.gather(stored)))
        earlier = [version for version in on_all_ranks if version < self.version - 1]
        version, rows = sampled_by_one_of(read_rows(batch), earlier)
        sampled = np.cumsum([row.loss_mask.sum() for row in rows])
        rows = rows[: 1 + int(np.searchsorted(sampled, _COMPARED_TOKENS))]
        if not rows or not all(self._ranks.gather(self._has_room())):
            return {}
        model = self._frozen.load(version, self.model)
        logprobs, _ = teaching.score_rows(rows, self.config, model, self._ranks)
        of_rows = []
        for row, own in zip(rows, logprobs, strict=True):
            of_rows.append(np.abs(own - row.logprobs)[row.loss_mask])
        differences = np.concatenate(of_rows)
        return {
            "lagged_difference_mean": float(differences.mean(dtype=np.float64)),
            "lagged_difference_max": float(differences.max()),
            "lagged_difference_tokens": float(differences.size),
            "lagged_difference_version": float(version),
        }

    def _has_room(self) -> bool:
        """Whether this rank has memory for a second policy that is not trained."""
        weights = sum(
            math.prod(part_of_tensor.shape) for part_of_tensor in self.model.slices_by_name.values()
        )
        return free_memory(self.model.device) > _ROOM * weights * self._dtype.itemsize

    def _prepare_batch(self, batch: pa.Table) -> tuple[list[Row], PolicyLoss, dict[str, float]]:
        """The rows of a batch with what they teach, the policy's part of their loss, and metrics of what a
        teacher says of them."""
        rows = read_rows(batch)
        config = self.config
        needs = config.needs | config.loss.needs
        teacher = config.teacher
        stands_in = "reference" in needs or (teacher is not None and teacher.weights is not None)
        if self._base and self.device == "cpu" and stands_in:
            # a checkpoint that is being stored reads the factors that those of a version stand in for
            self.await_checkpoint()
        if not needs and not batch["advantages"].null_count:
            return rows, config.loss.policy, {}
        scores = teaching.compute_scores(
            rows, config, self.model, self._ranks, self.version, self._frozen, self._critic, batch
        )
        taught = teaching.prepare_rows(rows, batch, scores, config, self.version)
        return taught, teaching.fit_policy_loss(taught, scores, config.loss), teacher_metrics(rows, scores)

    def _optimise(self, rows: list[Row], policy_loss: PolicyLoss, per_token: PerToken) -> float:
        """One optimiser step on these rows; appends the metrics of every token, returns the gradient norm."""
        config = self.config
        weighted, total = teaching.weigh_rows(rows, config.loss)
        metrics_per_token = per_token if self.model.measures else defaultdict(list)
        loss = partial(self._loss, total, policy_loss, metrics_per_token)
        targets = self._find_targets()
        teaches_all = config.loss.teaches_all or targets is not None
        teaches = [teaches_all or bool(row.advantages.any()) for row in weighted]
        taught = [row for row, does in zip(weighted, teaches, strict=True) if does]
        self.model.forward_backward(self._share(taught), loss, targets)
        # the others need no backward pass: a third of the work
        not_taught = [row for row, does in zip(weighted, teaches, strict=True) if not does]
        self.model.forward(self._share(not_taught), loss)
        self._optimizer_steps += 1
        adam = AdamSettings(self._learning_rate, config.betas, config.weight_decay, config.max_grad_norm)
        if self.device == "cpu":
            # a checkpoint that is being stored reads what the update changes
            self.await_checkpoint()
        grad_norm = self.model.update(adam)
        if not np.isfinite(grad_norm):
            self._check_teacher(rows, metrics_per_token)
            raise self._divergence("the gradient")
        if self._critic is not None and config.critic is not None:
            adam = replace(adam, learning_rate=config.critic.learning_rate)
            norm, losses = train_critic(self._critic, config.critic, self._share(rows), rows, adam)
            per_token["value_loss"] += losses
            if not np.isfinite(norm):
                raise self._divergence("the critic's gradient")
        return grad_norm

    def _find_targets(self) -> Targets | None:
        """What gives the targets of a teacher by whose distributions the policy learns."""
        settings = self.config.teacher
        if settings is None or not settings.is_loss:
            return None
        teacher = cast(TeacherModel, self._frozen.model_of("teacher", settings.model or 0, self.model))
        return lambda microbatch: Target(*teacher.predict(microbatch), settings.divergence)

    def _check_teacher(self, rows: list[Row], per_token: PerToken) -> None:
        """Raises ValueError if numbers of the teacher are not finite where the policy's are."""
        own = set[int]()
        for numbers in per_token["faulty"]:
            own.update(map(int, numbers))
        faulty = set[int]().union(*self._ranks.gather(own))
        if faulty:
            first = min(faulty)
            raise teaching.teacher_fault(next(row for row in rows if row.number == first))

    @property
    def _learning_rate(self) -> float:
        """That of the last optimiser step."""
        return self.config.rate * min(1.0, self._optimizer_steps / (self.config.warmup_steps + 1))

    def _divergence(self, subject: str) -> ValueError:
        return ValueError(
            f"training diverged on the way to version {self.version + 1}: {subject} is not finite; continue "
            f"from version {self.version} with a lower train.learning_rate, now {self.config.rate:g}"
        )

    def _share(self, rows: list[Row]) -> list[Microbatch]:
        """This rank's part of the rows."""
        return share(rows, self.model.share, self.model.num_shares, packing_of(self.config, self.model))

    def _loss(
        self,
        total: float,
        policy_loss: PolicyLoss,
        per_token: PerToken,
        microbatch: Microbatch,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        divergences: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The microbatch's part of the loss, which is a sum over tokens divided by `total`."""
        settings = self.config.loss
        old = microbatch.logprobs
        tokens = Tokens(
            logprobs, microbatch.old, microbatch.advantages, microbatch.row, len(microbatch.numbers)
        )
        losses = policy_loss(tokens)
        if settings.correction is not None:
            losses = losses * microbatch.correction
        if settings.kl is not None and settings.kl.place == "loss":
            losses = losses + settings.kl.coefficient * settings.kl(logprobs, microbatch.reference)
        if settings.entropy:
            losses = losses - settings.entropy * entropies
        if divergences is not None and (teacher := self.config.teacher) is not None:
            losses = losses + teacher.coefficient * divergences
        loss = microbatch.weights * losses
        metrics = divergence(tokens, policy_loss, old, microbatch.reference)
        metrics |= {"loss": loss.detach(), "entropy": entropies.detach()}
        if divergences is not None:
            metrics["teacher_kl"] = divergences.detach()
            faulty = ~divergences.isfinite() & entropies.isfinite()
            metrics["faulty"] = torch.from_numpy(microbatch.numbers)[microbatch.row[faulty].cpu()]
        lag = self.version - microbatch.policy_versions
        metrics["lag"] = lag.float()
        # with different weights the difference would not be the engine's
        same_weights = (lag == 0) & (self._optimizer_steps == self._steps_before)
        metrics["engine_difference"] = (logprobs.detach() - old).abs()[same_weights]
        for name, values in metrics.items():
            per_token[name].append(values)
        return loss.sum() / total

    @property
    def teacher_digest(self) -> str:
        name = None if self.config.teacher is None else self.config.teacher.model
        return "" if name is None else self._frozen.digest_of(name)

    def rest(self) -> None:
        """Give the device's memory back, between steps."""
        self.state.rest()
        self._frozen.rest()

    def wake(self) -> None:
        """Be as before `rest`."""
        self.state.wake()
        self._frozen.wake()

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of what transformers would save, under the names it would save it, in the published dtype;
        on rank 0 only."""
        dtype = self._dtype
        return {
            name: tensor.to(
                "cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True
            ).contiguous()
            for name, tensor in self._whole().items()
        }

    def save_weights(self, folder: str, before: str) -> list[FileRef]:
        """Store the weights as those of the trainer's version; only rank 0 writes."""
        weights = self._whole()
        return self._publisher.save(folder, weights, self.version, before) if weights else []

    def _whole(self) -> dict[str, torch.Tensor]:
        """What transformers would save, on rank 0. May share memory with the model."""
        masters = self.model.slices([MASTER]).items()
        slices = {name.removeprefix(f"{MASTER}/"): master for name, master in masters}
        weights = self._ranks.collect(slices, self._dtype)
        return {} if self._ranks.rank else self.model.as_stored(weights)

    def save_checkpoint(self, folder: str) -> None:
        """Begin to store everything needed to continue bit for bit as if never stopped, each rank a part of
        every tensor. It goes on in the background; `await_checkpoint` returns when it is done. On a CPU
        nothing is copied for it, because a copy is as large as the trainer: the next update waits instead."""
        self.await_checkpoint()
        rank = self._ranks.rank
        size = self._ranks.size
        # what ranks of an earlier attempt may still be writing must not come after what these write
        self._ranks.gather(None)
        parts = self.state.slices(PARTS).items()
        slices = {name: (part_of_tensor, tensor.to("cpu")) for name, (part_of_tensor, tensor) in parts}
        progress = TrainerProgress(
            version=self.version, optimizer_steps=self._optimizer_steps, base=self._base
        )
        patience_s = self.config.gang_timeout_s
        self._background.begin(partial(save_shard, folder, slices, rank, size, progress, patience_s))

    def await_checkpoint(self) -> None:
        """Return when no checkpoint is being stored; raises the error of the one that was."""
        self._background.wait()

    def load_checkpoint(self, folder: str) -> None:
        """Go on from a checkpoint, which every rank reads. Raises ValueError on all of them, and changes
        nothing, if one of them finds none that is complete."""
        try:
            tensors, progress = load_checkpoint(folder, self.state.slices_by_name)
            of_another = progress.base != self._base
            fault = (
                f"{folder}: belongs to an adapter of other weights than the weights at the start of the run"
            ) * of_another
        except ValueError as error:
            fault = str(error)
        if faults := [found_fault for found_fault in self._ranks.gather(fault) if found_fault]:
            raise ValueError(faults[0])
        self.state.load(tensors, progress.optimizer_steps)
        self.version = progress.version
        self._optimizer_steps = progress.optimizer_steps
