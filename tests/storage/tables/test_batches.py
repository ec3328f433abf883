from dataclasses import replace

import numpy as np
import pytest

from storage.media import ImageSpan
from storage.run_directory import RunDirectory
from storage.tables.batches import BATCH_SCHEMA, read_batch, write_batch
from storage.tables.parquet import numpy_rows
from storage.tables.schema import SCHEMA, Trajectory
from storage.tables.trajectories import images_of, read_trajectories, write_trajectories


def row(session: str, length: int) -> Trajectory:
    return Trajectory(
        policy="policy",
        task_id="t",
        environment="e",
        group_id="g",
        session_id=session,
        branch_id="0",
        parent_branch_id=None,
        shared_prefix=0,
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, np.bool_),
        logprobs=np.full(length, -1, np.float32),
        policy_versions=np.zeros(length, np.int32),
        turns=[],
        messages="[]",
        reward=1.0,
        reward_parts={},
        status="finished",
        interruptions=0,
        started_at=0.0,
        finished_at=1.0,
    )


def test_a_batch_is_its_trajectories_and_the_filters_decision(run_anywhere: RunDirectory) -> None:
    source = write_trajectories(run_anywhere, 5, [row("a", 3), row("b", 2)], "shard-0-attempt-1")
    trajectories = read_trajectories(run_anywhere.path(source.uri))
    advantages = [np.array([0.5, -0.5, 0.0]), np.zeros(2)]
    ref = write_batch(
        run_anywhere,
        5,
        trajectories,
        advantages=advantages,
        weights=[np.ones(3), np.array([1.0, 0.0])],
        decisions=["train", "zero_variance"],
        part="attempt-1",
    )
    assert ref.uri == "batches/iteration=5/attempt-1.parquet"
    batch = read_batch(run_anywhere.path(ref.uri))
    assert batch.select(SCHEMA.names).equals(trajectories.select(SCHEMA.names))
    assert batch["iteration"].to_pylist() == [5, 5]
    assert batch["weights"].to_pylist() == [[1.0] * 3, [1.0, 0.0]]
    assert batch["decision"].to_pylist() == ["train", "zero_variance"]
    assert [list(a) for a in numpy_rows(batch["advantages"])] == [[0.5, -0.5, 0.0], [0.0, 0.0]]
    assert set(batch.column_names) == {"iteration", *BATCH_SCHEMA.names}


def test_a_batch_has_the_images_of_its_trajectories(run_anywhere: RunDirectory) -> None:
    shown = replace(row("a", 3), images=(ImageSpan("a" * 64, 1, 1, 28, 28),))
    source = write_trajectories(run_anywhere, 0, [shown, row("b", 2)], "part", is_multimodal=True)
    trajectories = read_trajectories(run_anywhere.path(source.uri))
    ref = write_batch(
        run_anywhere, 0, trajectories, advantages=None, weights=None, decisions=["train"] * 2, part="b"
    )
    assert images_of(read_batch(run_anywhere.path(ref.uri), ["images"])) == [shown.images, ()]


def test_what_the_train_step_makes_is_null(run_anywhere: RunDirectory) -> None:
    source = write_trajectories(run_anywhere, 0, [row("a", 3)], "part")
    trajectories = read_trajectories(run_anywhere.path(source.uri))
    ref = write_batch(
        run_anywhere, 0, trajectories, advantages=None, weights=None, decisions=["train"], part="b"
    )
    batch = read_batch(run_anywhere.path(ref.uri))
    assert (batch["advantages"].to_pylist(), batch["weights"].to_pylist()) == ([None], [None])


@pytest.mark.parametrize(("name", "numbers"), [("advantage", (2, 3)), ("weight", (3, 2))])
def test_one_advantage_and_one_weight_per_token_are_required(
    run_anywhere: RunDirectory, name: str, numbers: tuple[int, int]
) -> None:
    source = write_trajectories(run_anywhere, 0, [row("a", 3)], "part")
    advantages, weights = ([np.zeros(number)] for number in numbers)
    with pytest.raises(ValueError, match=f"one {name} per token"):
        write_batch(
            run_anywhere,
            0,
            read_trajectories(run_anywhere.path(source.uri)),
            advantages=advantages,
            weights=weights,
            decisions=["train"],
            part="part",
        )
