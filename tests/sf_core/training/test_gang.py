"""Tries at a train stage: what is decided about them, and that one that is over writes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.config import RunConfig
from sf_core.scheduling.plan import Worker
from sf_core.training.gang import (
    MAX_ATTEMPTS,
    GangError,
    GangPlan,
    RankAssignment,
    RankEnd,
    SupersededError,
    check_counts,
)
from storage import files
from storage.gangs import GangFiles
from storage.run_directory import RunDirectory
from tests.bench.runs import commit


@pytest.mark.parametrize("end", ["the flow ended it", "a later attempt began", "another try committed"])
def test_a_try_that_is_over_replaces_no_file(tmp_path: Path, end: str) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    assert run.begin_attempt() == 1
    gang_files = GangFiles(run, 4, attempt=1, step_attempt=0)
    uri = run.path("weights", "v00005", "model.safetensors")
    with files.fence(partial(check_counts, gang_files)), pytest.raises(SupersededError, match="iteration 4"):
        files.write_atomic(uri, b"by this try")
        with files.writer(uri) as file:
            file.write(b"late")
            if end == "the flow ended it":
                gang_files.end()
            elif end == "a later attempt began":
                run.begin_attempt()
            else:
                commit(run, 4, "train")
    assert files.read_bytes(uri) == b"by this try"


GANG = ("t0", "t1")
T0 = {"t0": "tcp://0"}
HERE = T0 | {"t1": "tcp://1"}
DONE = RankEnd()
BROKEN = RankEnd(ValueError("the batch is empty"))
ALONE = RankEnd(GangError("rank 1 is missing"), "others")
REPLACED = RankEnd(SupersededError("Dask began it again"), "worker")


def gang(*, here: tuple[str, ...] = GANG, trainers: tuple[str, ...] = GANG, **train: Any) -> GangPlan:
    """A gang of t0 and t1 in its first try."""
    settings = {"workers": 2, "gang_timeout_s": 10, **train}
    config = RunConfig.model_validate({"train": settings, "cluster": {"yield_timeout_s": 5}})
    plan = GangPlan(trainers, config, here)
    plan.begin_attempt()
    return plan


def trainers(*names: str) -> list[Worker]:
    return [Worker(name, frozenset({"rollout", "train"})) for name in names]


def test_each_try_has_a_rank_per_worker_and_an_epoch() -> None:
    plan = gang()
    assert plan.begin_attempt() == [RankAssignment(GANG, 0, 1), RankAssignment(GANG, 1, 1)]
    assert gang(trainers=()).begin_attempt() == []


@pytest.mark.parametrize(
    ("min_workers", "here", "begin"),
    [
        (None, ("t1",), GANG),
        (1, ("t1",), ("t1",)),
        (2, ("t1",), GANG),
        (1, (), GANG),
        (1, GANG, GANG),
    ],
)
def test_a_trainer_that_is_away_is_awaited_unless_fewer_suffice(
    min_workers: int | None, here: tuple[str, ...], begin: tuple[str, ...]
) -> None:
    assert gang(here=here, min_workers=min_workers).workers == begin


def test_of_the_trainers_that_are_there_as_many_begin_as_hold_whole_policies() -> None:
    six = tuple(f"t{number}" for number in range(6))
    cut = {"backend": "megatron", "tensor_parallel": 2, "workers": 6, "min_workers": 2}
    assert gang(trainers=six, here=six[:5], **cut).workers == six[:4]


def test_a_rank_whose_device_was_lent_is_late_while_the_process_that_held_it_is_there() -> None:
    plan = gang()
    addresses = {"t0": "tcp://0", "t1": "tcp://1"}
    assert plan.revoke_first([("t1", "t1-0.1"), ("r0", "r0-1.1")], addresses) == {("t1", "t1-0.1")}
    assert plan.yield_s == 5
    assert plan.late(set(), addresses) == ["t1"]
    assert plan.late({"t1"}, addresses) == []
    assert plan.late(set(), {"t0": "tcp://0"}) == []
    assert plan.late(set(), addresses | {"t1": "tcp://restarted"}) == []


def test_leases_that_came_after_those_that_were_lent_are_revoked_once() -> None:
    plan = gang()
    plan.revoke_first([("t1", "t1-0.1")], {})
    assert plan.revoke_next([("t1", "t1-0.1"), ("t1", "t1-2.1")]) == {("t1", "t1-2.1")}
    assert plan.revoke_next([("t1", "t1-2.1")]) == set()


def test_a_later_try_takes_all_devices_and_knows_no_loans() -> None:
    plan = gang()
    addresses = {"t0": "tcp://0", "t1": "tcp://1"}
    plan.begin_attempt()
    assert plan.revoke_first([("t1", "t1-0.1")], addresses) == set()
    assert plan.yield_s == 15
    assert plan.late({"t1"}, addresses) == ["t0"]
    assert plan.revoke_next([("t0", "t0-2.1")]) == {("t0", "t0-2.1")}


def test_once_rank_0_has_ended_the_others_have_a_while_to_end() -> None:
    plan = gang()
    looks = [plan.observe(now, HERE, {"t0": DONE} if now else {}) for now in (0, 100, 110, 110.1)]
    assert [(look.fence, look.give_up) for look in looks] == [(False, False)] * 3 + [(False, True)]


def test_when_a_rank_has_failed_the_others_are_told_at_once_and_have_a_while_to_end() -> None:
    plan = gang()
    looks = [plan.observe(now, HERE, {"t1": BROKEN}) for now in (0, 10, 10.1)]
    assert [(look.fence, look.give_up) for look in looks] == [(True, False), (False, False), (False, True)]


def test_a_worker_that_comes_back_in_time_is_not_given_up() -> None:
    plan = gang()
    looks = [plan.observe(now, here, {}) for now, here in ((0, T0), (10, HERE), (20, T0), (20.1, T0))]
    assert [look.away for look in looks] == [["t1"], [], ["t1"], ["t1"]]
    assert [look.fence for look in looks] == [False, False, False, True]


def test_ranks_that_are_all_away_for_too_long_are_awaited_no_longer() -> None:
    plan = gang()
    assert not plan.observe(0, {}, {}).give_up
    look = plan.observe(10.1, {}, {})
    assert (look.fence, look.give_up) == (True, True)


def test_a_worker_that_was_restarted_is_named_until_its_rank_has_ended() -> None:
    plan = gang()
    plan.begin_attempt()
    plan.revoke_first([], HERE)
    assert plan.observe(0, HERE, {}).restarted == []
    assert plan.observe(1, T0, {}).restarted == []
    again = HERE | {"t1": "tcp://2"}
    assert plan.observe(2, again, {}).restarted == ["t1"]
    assert plan.observe(3, again, {"t1": DONE}).restarted == []


def test_the_next_try_begins_with_patience() -> None:
    plan = gang()
    plan.observe(0, {}, {})
    plan.observe(20, {}, {})
    plan.begin_attempt()
    assert not plan.observe(21, {}, {}).give_up


def test_ranks_that_lost_each_other_try_again_on_the_same_workers() -> None:
    plan = gang()
    failure = plan.judge({"t0": ALONE, "t1": ALONE})
    assert (failure.error, failure.is_final, failure.unfinished) == (ALONE.error, False, [])
    plan.choose_again(trainers("t0", "t1", "t2"))
    assert plan.workers == GANG


@pytest.mark.parametrize("ends", [{"t0": ALONE, "t1": REPLACED}, {"t0": ALONE}, {"t0": ALONE, "t1": BROKEN}])
def test_who_was_lost_or_failed_trains_again_only_where_others_are_too_few(ends: dict[str, RankEnd]) -> None:
    plan = gang()
    failure = plan.judge(ends)
    assert failure.unfinished == [worker for worker in GANG if worker not in ends]
    plan.choose_again(trainers("t0", "t1", "t2"))
    assert plan.workers == ("t0", "t2")
    plan.choose_again(trainers("t0", "t1"))
    assert plan.workers == GANG
    with pytest.raises(
        ValueError, match=r"train.workers is 2, but the number of workers tagged .*train is 1"
    ):
        plan.choose_again(trainers("t0"))


def test_a_rank_s_own_error_is_named_before_those_that_follow_from_it() -> None:
    assert gang().judge({"t0": ALONE, "t1": BROKEN}).error is BROKEN.error
    assert gang().judge({"t0": ALONE}).error is ALONE.error
    left = gang().judge({"t0": DONE}).error
    assert str(left) == "t1 left and did not come back within 10 s"


def test_ranks_that_have_all_failed_by_themselves_do_not_try_again() -> None:
    assert gang().judge({"t0": BROKEN, "t1": BROKEN}).is_final
    assert not gang().judge({"t0": BROKEN}).is_final


@given(
    st.lists(
        st.dictionaries(st.sampled_from(GANG), st.sampled_from([DONE, BROKEN, ALONE, REPLACED])),
        min_size=MAX_ATTEMPTS,
        max_size=MAX_ATTEMPTS,
    )
)
def test_tries_end_and_only_unfinished_ranks_are_killed(tries: list[dict[str, RankEnd]]) -> None:
    plan = gang(min_workers=1)
    for number, ends in enumerate(tries):
        ended = {worker: end for worker, end in ends.items() if worker in plan.workers}
        failure = plan.judge(ended)
        assert {*failure.unfinished} == {*plan.workers} - ended.keys()
        if failure.is_final:
            break
        assert number < MAX_ATTEMPTS - 1
        plan.choose_again(trainers("t0", "t1"))
        assignments = plan.begin_attempt()
        assert [assignment.step_attempt for assignment in assignments] == [number + 1] * len(plan.workers)
        assert {assignment.workers[assignment.rank] for assignment in assignments} == {*plan.workers}
    assert failure.is_final
