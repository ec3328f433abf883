"""The trainer: a batch in, the next policy version out. Knows no runs, stages or engines."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sf_core.config import TrainConfig
from sf_core.models.sampling import sampling_logprobs
from sf_core.training.losses import LOSSES, divergence, entropy
from sf_core.training.packing import Microbatch, Row, deal, pack, read_rows, split_groups
from sf_core.training.torch.network import Network
from sf_core.training.torch.ranks import Ranks, SingleRank
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.files import FileRef
from storage.trajectories import first_rows
from storage.weights import save_weights


class Trainer:
    """Trains a policy that starts at version 0 with the weights of a Hugging Face folder.

    Each of several ranks computes on its share of every optimiser step's rows; all of them must call `step`
    with the same batch and the same settings, and hold the same weights after it.
    """

    config: TrainConfig
    """The settings of the next step; they may change between steps."""

    def __init__(
        self,
        model_dir: str,
        config: TrainConfig,
        *,
        seed: int,
        ranks: Ranks | None = None,
        device: str = "cpu",
    ) -> None:
        self.version = 0
        self.config, self._seed = config, seed
        self._ranks: Ranks = ranks or SingleRank()
        self.network = Network(model_dir, device)
        self._model = self.network.model
        self.device = self._model.device.type
        # learning rate, betas and weight decay are set in every step
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._optimizer_steps = self._steps_before = 0
        for parameter in self._model.parameters():
            # a step in which no row has an advantage must have gradient zero, not None
            parameter.grad = torch.zeros_like(parameter)

    def step(self, batch: pa.Table) -> dict[str, float]:
        """Train on a batch of storage.batches; returns the metrics of the step, the same on every rank.

        Raises ExchangeError if another rank is gone, or ValueError if the weights would not stay finite;
        the trainer must not be used after that."""
        started, cpu_started = time.perf_counter(), time.process_time()
        self._steps_before = self._optimizer_steps
        rows = read_rows(batch)
        random = np.random.default_rng((self._seed, self.version))
        per_token: dict[str, list[torch.Tensor]] = defaultdict(list)
        grad_norms = []
        for part in split_groups(rows, self.config.minibatches, random):
            grad_norms.append(self._optimise(part, per_token))
        if not all(bool(p.isfinite().all()) for p in self._model.parameters()):
            raise self._divergence("a weight")
        own = _summaries({name: torch.cat(per_token[name]) for name in MEANS if per_token[name]})
        of_ranks = self._ranks.gather((own, time.process_time() - cpu_started))
        self.version += 1
        return {
            **_token_metrics([summaries for summaries, _ in of_ranks]),
            **_batch_metrics(batch, rows),
            "grad_norm": float(np.mean(grad_norms)),
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "seconds": time.perf_counter() - started,
            "cpu_seconds": sum(cpu_seconds for _, cpu_seconds in of_ranks),
        }

    def _optimise(self, rows: list[Row], per_token: dict[str, list[torch.Tensor]]) -> float:
        """One optimiser step on these rows; appends the metrics of every token, returns the gradient norm."""
        config = self.config
        total = sum(row.weight * int(row.loss_mask.sum()) for row in rows)
        teaching = [row for row in rows if row.advantages.any()]
        for microbatch in pack(self._share(teaching), config.tokens_per_microbatch):
            loss, metrics = self._loss(microbatch)
            (loss.sum() / total).backward()
            for name, values in metrics.items():
                per_token[name].append(values)
        self._measure(self._share([row for row in rows if not row.advantages.any()]), per_token)
        self._ranks.add_up(p.grad for p in self._model.parameters() if p.grad is not None)
        grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.max_grad_norm)
        if not grad_norm.isfinite():
            raise self._divergence("the gradient")
        self._optimizer_steps += 1
        progress = min(1.0, self._optimizer_steps / (config.warmup_steps + 1))
        for group in self._optimizer.param_groups:
            # all of them, because a loaded checkpoint brings its own
            group["lr"] = config.learning_rate * progress
            group["betas"], group["weight_decay"] = config.betas, config.weight_decay
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        return float(grad_norm)

    def _divergence(self, what: str) -> ValueError:
        return ValueError(
            f"training diverged on the way to version {self.version + 1}: {what} is not finite; go on from "
            f"version {self.version} with a lower train.learning_rate, now {self.config.learning_rate:g}"
        )

    def _share(self, rows: list[Row]) -> list[Row]:
        """This rank's part of the rows."""
        return deal(rows, self._ranks.size)[self._ranks.rank]

    @torch.no_grad()
    def _measure(self, rows: list[Row], per_token: dict[str, list[torch.Tensor]]) -> None:
        """Add the metrics of rows without advantages, which need no backward pass: a third of the work."""
        for microbatch in pack(rows, self.config.tokens_per_microbatch):
            for name, values in self._loss(microbatch)[1].items():
                per_token[name].append(values)

    def _loss(self, microbatch: Microbatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        microbatch = microbatch.to(self._model.device)
        logits = self.network.logits(microbatch)
        drawn = microbatch.sampling
        logprobs = sampling_logprobs(
            logits, microbatch.targets, drawn["temperature"], drawn["top_p"], drawn["top_k"]
        )
        old, advantages = microbatch.logprobs, microbatch.advantages
        loss = microbatch.weights * LOSSES[self.config.loss](logprobs, old, advantages, self.config)
        metrics = divergence(logprobs, old, advantages, self.config)
        metrics["loss"] = loss.detach()
        metrics["entropy"] = entropy(logits.detach(), logits.new_tensor(drawn["temperature"]))
        lag = self.version - microbatch.policy_versions
        metrics["lag"] = lag.float()
        # with different weights the difference would not be the engine's
        same_weights = (lag == 0) & (self._optimizer_steps == self._steps_before)
        metrics["engine_difference"] = (logprobs.detach() - old).abs()[same_weights]
        return loss, metrics

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of what transformers would save, under the names it would save them."""
        return self.network.weights()

    def save_weights(self, folder: str) -> FileRef | None:
        """Store the weights as those of the trainer's version; only rank 0 writes."""
        return None if self._ranks.rank else save_weights(folder, self.weights(), self.version)

    def save_checkpoint(self, folder: str) -> None:
        """Store everything needed to continue bit for bit as if never stopped; only rank 0 writes."""
        if self._ranks.rank:
            return
        state = {"version": self.version, "optimizer_steps": self._optimizer_steps}
        save_checkpoint(folder, self._model.state_dict(), self._optimizer.state_dict(), state)

    def load_checkpoint(self, folder: str) -> None:
        """Raises ValueError if the folder holds no complete checkpoint."""
        checkpoint = load_checkpoint(folder)
        self._model.load_state_dict(checkpoint.model)
        self._optimizer.load_state_dict(checkpoint.optimizer)
        self.version = checkpoint.state["version"]
        self._optimizer_steps = checkpoint.state["optimizer_steps"]


MEANS = {
    "loss": "loss",
    "entropy": "entropy",
    "kl": "kl",
    "clipped": "clip_fraction",
    "ratio": "ratio_mean",
    "logprob_difference": "logprob_difference_mean",
    "engine_difference": "engine_difference_mean",
    "lag": "lag_mean",
}
MAXIMA = {
    "ratio": "ratio_max",
    "logprob_difference": "logprob_difference_max",
    "engine_difference": "engine_difference_max",
    "lag": "lag_max",
}


@dataclass(frozen=True, slots=True)
class _Summary:
    """Summary of one metric over the tokens of one rank."""

    count: int
    mean: float
    maximum: float


def _summaries(per_token: dict[str, torch.Tensor]) -> dict[str, _Summary]:
    return {
        name: _Summary(values.numel(), float(values.mean()), float(values.max()))
        for name, values in per_token.items()
        if values.numel()
    }


def _token_metrics(of_ranks: list[dict[str, _Summary]]) -> dict[str, float]:
    """Means over the trained tokens of all ranks, and maxima where these matter; NaN over none."""
    parts = {name: [own[name] for own in of_ranks if name in own] for name in MEANS}
    means = {label: _mean(parts[name]) for name, label in MEANS.items()}
    maxima = {
        label: max((part.maximum for part in parts[name]), default=math.nan) for name, label in MAXIMA.items()
    }
    return means | maxima


def _mean(parts: list[_Summary]) -> float:
    if len(parts) == 1:
        return parts[0].mean
    tokens = sum(part.count for part in parts)
    return sum(part.mean * part.count for part in parts) / tokens if tokens else math.nan


def _batch_metrics(batch: pa.Table, rows: list[Row]) -> dict[str, float]:
    """Metrics of a batch; rewards and advantages count once per session, whatever its branches."""
    sampled = np.array([row.loss_mask.sum() for row in rows])
    rewards: Any = batch["reward"].to_numpy()[first_rows(batch["session_id"])]
    sessions, taught = ({r.session for r in some} for some in (rows, [r for r in rows if r.advantages.any()]))
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "length_mean": float(np.mean([row.token_ids.size for row in rows])),
        "length_max": float(max(row.token_ids.size for row in rows)),
        "sampled_mean": float(sampled.mean()),
        "sampled_max": float(sampled.max()),
        "tokens": float(sampled.sum()),
        "rows": float(len(rows)),
        "zero_advantage_share": len(sessions - taught) / len(sessions),
    }
