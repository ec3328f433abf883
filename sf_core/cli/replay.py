"""`sf replay`: repeats a train step of a stored run, from the checkpoint before it, on the stored batch.

Samples nothing and writes nothing. A step is a function of the weights, the optimiser state, the batch and
the settings, so the new weights are bitwise equal to the old ones, on the same machine and libraries.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import cast

import torch

from sf_core.cli.terminal import hide_progress_bars
from sf_core.reports.view import RunView
from sf_core.scheduling.worker import worker_threads
from sf_core.scheduling.worker_state import WorkerState
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.backends import trainer_backend, trainer_kind
from sf_core.training.stored_steps import read_stored_batch, read_stored_settings
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.ranks import SingleRank
from storage.manifests import Manifest
from storage.run_directory import RunDirectory
from storage.tensors.weights import FIRST_NAMES, first_file, has_weights, load_weights, pack_weights


@dataclass(frozen=True, slots=True)
class Replay:
    iteration: int
    equal: bool
    """Whether the weights are bitwise equal; if the stored ones are gone, by the checksum in the manifest."""
    largest_difference: float | None
    """Largest absolute difference of an element of the weights; None if the stored weights are gone."""
    metrics: dict[str, tuple[float, float]]
    """(New, stored) value of each metric that differs and does not measure time."""


def replay(uri: str, iteration: int) -> Replay:
    """Train the iteration again and compare. Raises ValueError with one sentence if there is no such run or
    iteration, its batch is damaged, its GPU is missing, or the run is emulated."""
    directory = RunView.open(uri).run
    train = _read_committed(directory, iteration, "train")
    _read_committed(directory, iteration, "filter")
    run = OpenRun(RunRef(directory.run_id, directory.uri, dataplane_url="", attempt=0))
    if not trainer_kind(run.config).computes_weights:
        raise ValueError(f"{directory.run_id}: the run is emulated and has no weights")
    batch = read_stored_batch(run, iteration)
    workers = run.config.cluster.workers.values()
    # sums are split among threads: another number of threads rounds differently
    torch.set_num_threads(next((worker_threads(w) for w in workers if "train" in w.tags), 1))
    device = train.data["device"]
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"iteration {iteration} was trained on a GPU, but this machine has none, and a CPU rounds "
            "differently"
        )
    hide_progress_bars()
    backend = cast(TorchBackend, trainer_backend(run.config, WorkerState("replay")))
    trainer = backend.rebuild_trainer(run, iteration, SingleRank(), device)
    trainer.config = read_stored_settings(run, iteration)
    metrics = trainer.step(batch)
    weights = trainer.weights()
    packed = pack_weights(weights, trainer.version)
    folder = directory.weights_dir(trainer.version)
    stored = load_weights(folder) if has_weights(folder) else None
    if stored is None:
        written = next(ref.sha256 for ref in train.outputs if ref.uri.endswith(FIRST_NAMES))
        equal = written == hashlib.sha256(b"".join(first_file(packed))).hexdigest()
        difference = None
    else:
        equal = packed.digest() == pack_weights(stored, trainer.version).digest()
        difference = max(float((weights[n].float() - stored[n].float()).abs().max()) for n in stored)
    return Replay(iteration, equal, difference, _compare(metrics, train))


def _read_committed(directory: RunDirectory, iteration: int, stage: str) -> Manifest:
    manifest = directory.read_manifest(iteration, stage)
    if manifest is None:
        raise ValueError(
            f"{directory.run_id}: the stage {stage} of iteration {iteration} is not committed; `sf inspect "
            f"{directory.uri}` shows the committed stages"
        )
    return manifest


def _compare(metrics: dict[str, float], train: Manifest) -> dict[str, tuple[float, float]]:
    pairs = {
        name: (value, train.data[name])
        for name, value in metrics.items()
        # JSON has no NaN: a mean over no tokens is null in the manifest
        if not name.endswith("seconds") and train.data.get(name) is not None
    }
    return {name: pair for name, pair in pairs.items() if not math.isclose(*pair, rel_tol=0.0)}
