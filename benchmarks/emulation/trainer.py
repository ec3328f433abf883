"""Emulated trainer: sleeps as long as devices would take, and publishes a file that holds only its version.

Imports no library that computes. Ranks meet through the files of their try, as they exchange no data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.emulation.device import switch
from benchmarks.emulation.device_model import DeviceModel
from sf_core.config.devices import WorkerDevice
from sf_core.training.backends import TrainedRun
from sf_core.training.gang import RankAssignment, wait_for
from sf_core.training.torch.publisher import Background
from storage.files import FileRef
from storage.gangs import GangFiles
from storage.tables.batches import select_training_rows
from storage.tables.trajectories import first_rows
from storage.tensors.weights import save_arrays


@dataclass(frozen=True, slots=True)
class EmulatedRanks:
    rank: int
    size: int
    exchange: Callable[[], None]
    """Blocks until every rank has computed its share, as an all-reduce of gradients would."""


class EmulatedTrainer:
    """One of the ranks that share every batch evenly."""

    device = "emulated"
    teacher_digest = ""

    def __init__(
        self, model: DeviceModel, version: int, ranks: EmulatedRanks, storing: Background | None = None
    ) -> None:
        """`storing`: the checkpoint that is being stored; the trainer before this one may have begun it."""
        self.version = version
        self._model = model
        self._ranks = ranks
        self._storing = storing or Background()

    def step(self, batch: pa.Table) -> dict[str, float]:
        """Sleep as long as the slowest rank needs for a step on the tokens of the rows that train, prompts
        included."""
        rows = select_training_rows(batch)
        num_tokens = pc.sum(pc.list_value_length(rows["token_ids"])).as_py()
        seconds = self._model.train_s(num_tokens, self._ranks.size)
        time.sleep(seconds)
        self._ranks.exchange()
        self.version += 1
        return {
            "tokens": float(pc.sum(pc.list_flatten(rows["loss_mask"])).as_py()),
            "rows": float(len(rows)),
            "reward_mean": float(pc.mean(batch["reward"].take(first_rows(batch["session_id"]))).as_py()),
            "seconds": seconds,
        }

    def compare_engines(self, batch: pa.Table, stored: Collection[int]) -> dict[str, float]:
        return {}

    def save_weights(self, folder: str, before: str) -> list[FileRef]:
        if self._ranks.rank:
            return []
        time.sleep(self._model.save_s())
        return [save_arrays(folder, {"version": np.array([self.version], dtype=np.int32)}, self.version)]

    def save_checkpoint(self, folder: str) -> None:
        """Take the time only: the version is the trainer's whole state, and the run knows it."""
        self.await_checkpoint()
        if not self._ranks.rank:
            self._storing.begin(partial(time.sleep, self._model.save_checkpoint_s()))

    def await_checkpoint(self) -> None:
        self._storing.wait()


class EmulatedBackend:
    """A TrainerBackend whose trainers are made anew for every step."""

    def __init__(self, device: WorkerDevice) -> None:
        self._device = device
        self._storing = Background()

    @contextmanager
    def meet(
        self, files: GangFiles, assignment: RankAssignment, host: str, timeout_s: float
    ) -> Iterator[EmulatedRanks]:
        """Begin together, and end when rank 0 has committed."""

        def wait(ranks: list[int], is_there: Callable[[int], bool], what: str) -> None:
            def missing() -> list[int]:
                return [rank for rank in ranks if not is_there(rank)]

            wait_for(files, assignment, lambda: not missing() or None, missing, what, timeout_s)

        def exchange() -> None:
            files.note_computed(assignment.rank)
            wait(assignment.other_ranks, files.has_computed, "has not computed its share")

        wait(assignment.other_ranks, files.has_begun, "has not begun")
        yield EmulatedRanks(assignment.rank, len(assignment.workers), exchange)
        if assignment.rank:
            wait([0], lambda _: files.is_committed(), "has not committed the step")

    @contextmanager
    def trainer_at(self, run: TrainedRun, version: int, ranks: EmulatedRanks) -> Iterator[EmulatedTrainer]:
        """Switch the device to training."""
        model = DeviceModel(run.config.emulation, self._device.figures)
        time.sleep(switch(self._device, "train", model.to_train_s()))
        yield EmulatedTrainer(model, version, ranks, self._storing)

    def rest(self) -> None:
        """Devices that are emulated have no memory."""

    def close(self) -> None: ...
