"""Checkpoints as trainers store them: beside the next step, by one rank or several, killed at any moment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from sf_core.config.devices import WorkerDevice
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.ranks import Ranks, SingleRank
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from storage import files
from storage.run_directory import RunDirectory
from storage.tensors.checkpoints import has_checkpoint
from storage.tensors.weights import load_weights
from storage.unfinished import list_unfinished
from tests import bench
from tests.bench.ages import age
from tests.bench.runs import copy_run


@pytest.fixture
def copied_run(trained_run: RunDirectory, tmp_path: Path) -> RunDirectory:
    return copy_run(trained_run, tmp_path)


def opened(uri: str) -> OpenRun:
    return OpenRun(RunRef(uri.rsplit("/", 1)[-1], uri, dataplane_url="", attempt=1))


def rebuilt(uri: str, ranks: Ranks) -> ModelTrainer:
    return TorchBackend(WorkerDevice()).rebuild_trainer(opened(uri), 3, ranks)


def holds(trainer: ModelTrainer, run: RunDirectory) -> bool:
    stored = load_weights(run.weights_dir(3))
    weights = trainer.weights()
    return all(torch.equal(stored[name], weights[name]) for name in stored)


Moment = tuple[Literal["write", "file"], int]
"""The n-th piece of data that is written, or the n-th file that is to appear, counted from 0."""


def save(uri: str, ranks: Ranks, *, dies: int | None = None, at: Moment = ("write", 0)) -> Any:
    """Store a checkpoint of version 3; one of the ranks kills its process on the way."""
    trainer = rebuilt(uri, ranks)
    if dies is not None:
        trainer.config = trainer.config.model_copy(update={"gang_timeout_s": 2.0})
    left = {"write": -1, "file": -1} | ({at[0]: at[1]} if ranks.rank == dies else {})

    def count(what: str) -> None:
        if left[what] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[what] -= 1

    write = files.HashedFile.write

    def counted(file: files.HashedFile, data: bytes | memoryview) -> int:
        count("write")
        return write(file, data)

    files.HashedFile.write = counted  # type: ignore[method-assign]
    with files.fence(partial(count, "file")):
        trainer.save_checkpoint(RunDirectory(uri).checkpoint_dir(3))
    trainer.await_checkpoint()
    return arrays(trainer)


def load(uri: str, ranks: Ranks) -> Any:
    run = opened(uri)
    trainer = ModelTrainer(
        partial(TorchModel, run.directory.start_dir), run.config.train, seed=0, ranks=ranks
    )
    trainer.load_checkpoint(RunDirectory(uri).checkpoint_dir(3))
    return arrays(trainer)


def arrays(trainer: ModelTrainer) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in trainer.weights().items()}


@pytest.mark.parametrize("at", [("write", 0), ("write", 1), ("write", 20), ("file", 0), ("file", 1)])
def test_a_kill_at_every_step_of_a_save_leaves_the_checkpoint_before(
    copied_run: RunDirectory, make_members: Callable[[int], list[bench.training.gang.Member]], at: Moment
) -> None:
    (member,) = make_members(1)
    member.sit(
        bench.training.gang.Try(copied_run.uri, (member.worker,)),
        partial(save, copied_run.uri, dies=0, at=at),
    )
    member.await_death()
    age(copied_run.uri)
    assert not has_checkpoint(copied_run.checkpoint_dir(3)) and list_unfinished(copied_run.uri)
    assert holds(rebuilt(copied_run.uri, SingleRank()), copied_run)


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("at", [("write", 0), ("write", 5), ("file", 0), ("file", 1)])
def test_a_kill_of_one_rank_at_every_step_of_a_save_leaves_the_checkpoint_before(
    copied_run: RunDirectory,
    make_members: Callable[[int], list[bench.training.gang.Member]],
    dies: int,
    at: Moment,
) -> None:
    gang = make_members(2)
    one = bench.training.gang.Try(copied_run.uri, tuple(member.worker for member in gang))
    for member in gang:
        member.sit(one, partial(save, copied_run.uri, dies=dies, at=at))
    gang[dies].await_death()
    said = gang[1 - dies].report()
    assert ("was not written in time" if dies else "is gone") in said
    assert not has_checkpoint(copied_run.checkpoint_dir(3))
    assert holds(rebuilt(copied_run.uri, SingleRank()), copied_run)


@pytest.mark.parametrize(("written_by", "read_by"), [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_other_ranks_go_on_from_what_some_have_stored(
    copied_run: RunDirectory,
    make_members: Callable[[int], list[bench.training.gang.Member]],
    written_by: int,
    read_by: int,
) -> None:
    gang = make_members(max(written_by, read_by))
    found = []
    for iteration, (size, work) in enumerate(((written_by, save), (read_by, load))):
        one = bench.training.gang.Try(
            copied_run.uri, tuple(member.worker for member in gang[:size]), iteration=iteration
        )
        for member in gang[:size]:
            member.sit(one, partial(work, copied_run.uri))
        found += [member.report() for member in gang[:size]]
    first, *others = filter(None, found)
    for weights in others:
        assert all((weights[name] == array).all() for name, array in first.items())


def test_a_checkpoint_is_of_the_version_that_was_held_when_it_was_begun(
    copied_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = rebuilt(copied_run.uri, SingleRank())
    may_write = threading.Event()
    write = files.HashedFile.write
    wait = trainer.await_checkpoint

    def wait_in_the_step() -> None:
        may_write.set()
        wait()

    def late(file: files.HashedFile, data: bytes | memoryview) -> int:
        may_write.wait(bench.waits.patience())
        return write(file, data)

    monkeypatch.setattr(files.HashedFile, "write", late)
    trainer.save_checkpoint(copied_run.checkpoint_dir(3))
    assert not has_checkpoint(copied_run.checkpoint_dir(3))
    # nothing was copied: the step's update waits until it is stored
    monkeypatch.setattr(trainer, "await_checkpoint", wait_in_the_step)
    trainer.step(bench.trained_runs.BATCHES[0])
    assert may_write.is_set() and has_checkpoint(copied_run.checkpoint_dir(3))
    # with nothing to replay from
    files.remove_folder(copied_run.path("batches"))
    assert holds(rebuilt(copied_run.uri, SingleRank()), copied_run)


def test_the_error_of_a_save_is_raised_by_the_next_one_and_then_forgotten(copied_run: RunDirectory) -> None:
    def refuse() -> None:
        raise ValueError("superseded")

    trainer = rebuilt(copied_run.uri, SingleRank())
    with files.fence(refuse):
        trainer.save_checkpoint(copied_run.checkpoint_dir(3))
    with pytest.raises(ValueError, match="superseded"):
        trainer.save_checkpoint(copied_run.checkpoint_dir(3))
    trainer.save_checkpoint(copied_run.checkpoint_dir(3))
    trainer.await_checkpoint()
    assert has_checkpoint(copied_run.checkpoint_dir(3))


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_checkpoint_is_none_and_the_one_before_is_taken(
    copied_run: RunDirectory, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = rebuilt(copied_run.uri, SingleRank())
    trainer.save_checkpoint(copied_run.checkpoint_dir(3))
    trainer.await_checkpoint()
    shard = f"{copied_run.checkpoint_dir(3)}/shard-1-of-1.safetensors"
    content = files.read_bytes(shard)
    if damage == "missing":
        files.remove(shard)
    else:
        files.write_atomic(shard, content[:-1] + (b"" if damage == "cut" else bytes([content[-1] ^ 1])))
    assert holds(rebuilt(copied_run.uri, SingleRank()), copied_run)
    assert f"{shard}: " in caplog.text and "the previous checkpoint is used" in caplog.text
