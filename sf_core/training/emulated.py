"""Emulated trainer: sleeps as long as devices would take, and publishes a file that holds only its version.

Imports no library that computes. Ranks meet through the files of their try, as they exchange no data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.engines.device_model import DeviceModel
from sf_core.engines.emulated_device import device_model, switch_to
from sf_core.training.gang import GangError, RankAssignment, SupersededError
from sf_core.training.protocol import TrainedRun
from storage.files import FileRef
from storage.gangs import GangFiles
from storage.trajectories import first_rows
from storage.weights import save_arrays

POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class EmulatedRanks:
    rank: int
    size: int
    meet: Callable[[], None]
    """Blocks until every rank has computed its share, as an all-reduce of gradients would."""


class EmulatedTrainer:
    """One of the ranks that share every batch evenly."""

    device = "emulated"

    def __init__(self, model: DeviceModel, version: int, ranks: EmulatedRanks) -> None:
        self.version = version
        self._model, self._ranks = model, ranks

    def step(self, batch: pa.Table) -> dict[str, float]:
        """Sleep as long as the slowest rank needs for a step on the batch's tokens, prompts included."""
        num_tokens = pc.sum(pc.list_value_length(batch["token_ids"])).as_py()
        seconds = self._model.train_s(num_tokens, self._ranks.size)
        time.sleep(seconds)
        self._ranks.meet()
        self.version += 1
        return {
            "tokens": float(pc.sum(pc.list_flatten(batch["loss_mask"])).as_py()),
            "rows": float(len(batch)),
            "reward_mean": float(pc.mean(batch["reward"].take(first_rows(batch["session_id"]))).as_py()),
            "seconds": seconds,
        }

    def save_weights(self, folder: str) -> FileRef:
        time.sleep(self._model.save_s())
        return save_arrays(folder, {"version": np.array([self.version], dtype=np.int32)}, self.version)

    def save_checkpoint(self, folder: str) -> None:
        """Sleep only: the version is the trainer's whole state, and the run knows it."""
        time.sleep(self._model.save_checkpoint_s())


@contextmanager
def seated(files: GangFiles, seat: RankAssignment, host: str, timeout_s: float) -> Iterator[EmulatedRanks]:
    """Like the rendezvous of real ranks: begin together, and end when rank 0 has committed."""
    if files.is_over() or not files.take_seat(seat.rank, once=not seat.is_alone):
        raise SupersededError(f"{seat.label}: try {seat.epoch} had begun here before, or is over")
    others = [rank for rank in range(len(seat.workers)) if rank != seat.rank]

    def absent() -> list[int]:
        return [rank for rank in others if not files.is_taken(rank)]

    def unfinished() -> list[int]:
        return [rank for rank in others if not files.has_computed(rank)]

    def meet() -> None:
        files.note_computed(seat.rank)
        _await(files, seat, unfinished, "has not computed its share", timeout_s)

    def uncommitted() -> list[int]:
        return [] if files.is_committed() else [0]

    _await(files, seat, absent, "has not begun", timeout_s)
    yield EmulatedRanks(seat.rank, len(seat.workers), meet)
    if seat.rank:
        _await(files, seat, uncommitted, "has not committed the step", timeout_s)


def _await(
    files: GangFiles, seat: RankAssignment, missing: Callable[[], list[int]], what: str, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while ranks := missing():
        if files.is_over():
            raise GangError(f"{seat.label}: the flow ended try {seat.epoch}")
        if time.monotonic() > deadline:
            names = ", ".join(map(seat.name_of, ranks))
            raise GangError(f"{seat.label}: {names} {what} within {timeout_s:g} s")
        time.sleep(POLL_S)


@contextmanager
def trainer_at(run: TrainedRun, version: int, ranks: EmulatedRanks) -> Iterator[EmulatedTrainer]:
    """Switch the device of this process to training and yield its trainer."""
    model = device_model(run.config)
    switch_to("train", model.to_train_s())
    yield EmulatedTrainer(model, version, ranks)
