from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sf_core.config import TrainConfig
from sf_core.training.torch.ranks import Ranks, SingleRank, make_group
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from tests.bench import training
from tests.bench.training import batches
from tests.bench.waits import wait_until

MakeMembers = Callable[[int], list[training.gang.Member]]


def run_all(
    members: list[training.gang.Member], one: training.gang.Try, work: Callable[[Ranks], Any]
) -> list[Any]:
    for member in members:
        member.sit(one, work)
    return [member.report() for member in members]


def written(folder: Path) -> list[tuple[Path, int]]:
    return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file())


def names(members: list[training.gang.Member]) -> tuple[str, ...]:
    return tuple(member.worker for member in members)


# --- what ranks do


def add_ranks(ranks: Ranks) -> tuple[str, float]:
    return ranks.group, sum(ranks.gather(ranks.rank + 1.0))


def fail_on(rank: int, ranks: Ranks) -> tuple[str, float]:
    if ranks.rank == rank:
        raise ValueError("this device is broken")
    return add_ranks(ranks)


def stop_on(rank: int, size: int, folder: str, ranks: Ranks) -> tuple[str, float]:
    Path(folder, f"met-{ranks.rank}").touch()
    if ranks.rank == rank:
        # a rank whose group is still being made may need this one's store, and may wait for its whole bound
        wait_until(lambda: len(list(Path(folder).glob("met-*"))) == size, "all to have met")
        os.kill(os.getpid(), signal.SIGSTOP)
    return add_ranks(ranks)


def miss_a_group(ranks: Ranks) -> str:
    with pytest.raises(RuntimeError):
        make_group(dist.HashStore(), 0, 2, "127.0.0.1", 0.2)
    return "missed"


def train(folder: str, steps: int, settings: dict[str, Any], ranks: Ranks) -> Any:
    config = TrainConfig.model_validate({"learning_rate": 1e-3, **settings})
    trainer = ModelTrainer(partial(TorchModel, folder), config, seed=0, ranks=ranks)
    metrics = [trainer.step(batch(seed)) for seed in range(steps)]
    return metrics, {name: tensor.numpy() for name, tensor in trainer.weights().items()}


def batch(seed: int) -> Any:
    return batches.make_batch(
        batches.grouped_rows(num_groups=6, group_size=4), logprob=-4.0, group_size=4, seed=seed, equal=4
    )


# --- tests


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_several_ranks_train_like_one(
    make_members: MakeMembers, two_layer_policy: str, tmp_path: Path, num_ranks: int
) -> None:
    settings = {"minibatches": 2, "tokens_per_microbatch": 128, "max_grad_norm": 0.05}
    expected_metrics, expected = train(two_layer_policy, 3, settings, SingleRank())
    gang = make_members(num_ranks)
    found = run_all(
        gang, training.gang.Try(str(tmp_path), names(gang)), partial(train, two_layer_policy, 3, settings)
    )
    weights = found[0][1]
    for name, tensor in expected.items():
        # sums of float32 in another order differ in the last place; AdamW divides by the root of their
        # squares, so where a gradient is nearly zero its step of 1e-3 may differ by some per cent
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=5e-5)
    for metrics, _ in found:
        for mine, alone in zip(metrics, expected_metrics, strict=True):
            for name in alone.keys() - {"seconds", "cpu_seconds"}:
                assert mine[name] == pytest.approx(alone[name], rel=1e-4, nan_ok=True), name


def test_a_gang_stays_together_from_step_to_step(make_members: MakeMembers, tmp_path: Path) -> None:
    gang = make_members(2)
    first = run_all(gang, training.gang.Try(str(tmp_path), names(gang)), add_ranks)
    second = run_all(gang, training.gang.Try(str(tmp_path), names(gang), iteration=1), add_ranks)
    assert first == second == [first[0]] * 2
    assert first[0][1] == 3.0


def test_a_restarted_member_makes_a_new_group(make_members: MakeMembers, tmp_path: Path) -> None:
    gang = make_members(2)
    first = run_all(gang, training.gang.Try(str(tmp_path), names(gang)), add_ranks)
    gang[0].end()
    gang[0] = training.gang.Member("t0")
    second = run_all(gang, training.gang.Try(str(tmp_path), names(gang), iteration=1), add_ranks)
    assert second[0] == second[1] and second[0][0] != first[0][0]
    assert second[0][1] == 3.0


def test_a_rank_that_does_not_come_is_named_after_the_bound(
    make_members: MakeMembers, tmp_path: Path
) -> None:
    gang = make_members(3)
    one = training.gang.Try(str(tmp_path), names(gang), timeout_s=3.0)
    gang[0].sit(one, add_ranks)
    # its time is over first, and rank 1 comes within it
    wait_until(lambda: one.files.has_begun(0), "rank 0", every_s=0.01)
    gang[1].sit(one, add_ranks)
    assert gang[0].report() == "GangError: rank 0 (t0): rank 2 (t2) has not begun within 3 s"
    assert "GangError: rank 1 (t1): rank 0 (t0)" in gang[1].report()


def test_without_rank_0_the_others_end_after_the_bound(make_members: MakeMembers, tmp_path: Path) -> None:
    gang = make_members(2)
    gang[1].sit(training.gang.Try(str(tmp_path), names(gang), timeout_s=0.5), add_ranks)
    assert gang[1].report() == "GangError: rank 1 (t1): rank 0 (t0) has not begun within 0.5 s"


def test_waiting_ranks_end_when_the_flow_ends_their_try(make_members: MakeMembers, tmp_path: Path) -> None:
    gang = make_members(2)
    one = training.gang.Try(str(tmp_path), names(gang))
    gang[1].sit(one, add_ranks)
    one.files.end()
    assert "attempt 0" in gang[1].report(5.0)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_failing_rank_ends_the_others_and_they_know_why(
    make_members: MakeMembers, tmp_path: Path, broken: int
) -> None:
    gang = make_members(2)
    reports = run_all(gang, training.gang.Try(str(tmp_path), names(gang)), partial(fail_on, broken))
    assert reports[broken] == "ValueError: this device is broken"
    assert reports[1 - broken].startswith(f"GangError: rank {1 - broken} (t{1 - broken}): rank {broken} ")
    assert "failed: ValueError: this device is broken" in reports[1 - broken]


@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_end_when_a_rank_dies_and_meet_again_in_the_next_try(
    make_members: MakeMembers, tmp_path: Path, killed: int
) -> None:
    gang = make_members(3)
    one = training.gang.Try(str(tmp_path), names(gang), timeout_s=120.0)
    for member in gang:
        member.sit(one, partial(stop_on, killed, 3, str(tmp_path)))
    left = [member for rank, member in enumerate(gang) if rank != killed]
    gang[killed].await_stop()
    with pytest.raises(AssertionError):
        left[0].report(1.0)  # it waits for the one that stands still
    gang[killed].signal(signal.SIGKILL)
    for member in left:
        assert f"rank {killed} (t{killed})" in member.report(60.0)
    again = run_all(left, training.gang.Try(str(tmp_path), names(left), step_attempt=1), add_ranks)
    assert again == [(again[0][0], 3.0)] * 2


def test_a_rank_whose_group_did_not_come_about_joins_the_next_one(
    make_members: MakeMembers, tmp_path: Path
) -> None:
    gang = make_members(2)
    assert run_all(gang[:1], training.gang.Try(str(tmp_path), names(gang[:1])), miss_a_group) == ["missed"]
    found = run_all(
        gang, training.gang.Try(str(tmp_path), names(gang), iteration=1, timeout_s=5.0), add_ranks
    )
    assert found == [(found[0][0], 3.0)] * 2


def test_a_rank_that_stands_still_is_named_after_the_bound(make_members: MakeMembers, tmp_path: Path) -> None:
    gang = make_members(2)
    for member in gang:
        member.sit(
            training.gang.Try(str(tmp_path), names(gang), timeout_s=2.0),
            partial(stop_on, 1, 2, str(tmp_path)),
        )
    assert "rank 1 (t1) does not answer since an exchange failed" in gang[0].report(20.0)


def test_a_rank_that_dask_runs_again_touches_nothing(make_members: MakeMembers, tmp_path: Path) -> None:
    gang = make_members(2)
    one = training.gang.Try(str(tmp_path), names(gang))
    run_all(gang, one, add_ranks)
    before = written(tmp_path)
    gang[1].sit(one, add_ranks)
    assert (
        gang[1].report().startswith("SupersededError: rank 1 (t1): attempt 0 already started on this worker")
    )
    assert written(tmp_path) == before


def test_a_single_rank_needs_nobody_and_may_be_run_again(make_members: MakeMembers, tmp_path: Path) -> None:
    gang = make_members(1)
    one = training.gang.Try(str(tmp_path), names(gang))
    assert run_all(gang, one, add_ranks) == run_all(gang, one, add_ranks) == [("", 1.0)]
    one.files.end()
    gang[0].sit(one, add_ranks)
    assert gang[0].report().startswith("SupersededError")
