from pathlib import Path

import numpy as np
import pyarrow as pa

from sf_core.recipes.tables import samples_of
from storage.run_directory import RunDirectory
from storage.tables.schema import TurnSpan
from storage.tables.trajectories import read_trajectories, write_trajectories
from tests.bench.runs import conversation

USER = {"role": "user", "content": "?"}
ANSWER = {"role": "assistant", "content": "!"}


def rows(folder: Path, *trajectories: dict[str, object]) -> pa.Table:
    run = RunDirectory(str(folder))
    given = [conversation([USER, ANSWER, USER, ANSWER], **changes) for changes in trajectories]
    return read_trajectories(run.path(write_trajectories(run, 0, given, "part").uri))


def turns(*reasons: str | None) -> list[TurnSpan]:
    roles = ["user", "assistant"] * 2
    return [
        TurnSpan(role, i, i + 1, reason) for i, (role, reason) in enumerate(zip(roles, reasons, strict=True))
    ]


def test_sessions_are_counted_once_and_groups_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    found = samples_of(
        rows(
            tmp_path,
            {"session_id": "b", "group_id": "g10", "reward": 2.0},
            {"session_id": "b", "group_id": "g10", "reward": 2.0, "branch_id": "b.1"},
            {"session_id": "a", "group_id": "g9", "reward": 1.0, "status": "timeout"},
            {"session_id": "c", "group_id": "g10", "reward": 4.0},
        ),
        iteration=3,
    )
    assert found.sessions.tolist() == [0, 0, 1, 2]
    assert (found.rewards.tolist(), found.groups.tolist()) == ([2.0, 1.0, 4.0], [0, 1, 0])
    assert (found.group_size.tolist(), found.statuses) == ([2, 1, 2], ["finished", "timeout", "finished"])
    assert found.group_mean(found.rewards).tolist() == [3.0, 1.0, 3.0]
    assert [mask.tolist() for mask in found.masks] == [[False, True, False, True]] * 4
    assert [versions.tolist() for versions in found.versions] == [[-1, 0, -1, 0]] * 4
    spread = found.spread(np.array([1.0, 2.0, 3.0]))
    assert [row.tolist() for row in spread] == [[0, v, 0, v] for v in (1, 1, 2, 3)]
    assert found.select_trained(spread).tolist() == [1, 1, 1, 1, 2, 2, 3, 3]


def test_turns_are_those_that_were_sampled_and_rows_know_their_parents(tmp_path: Path) -> None:
    asked = TurnSpan("user", 0, 1)
    answered = TurnSpan("assistant", 1, 2, "stop", "r0", reward=0.5)
    written_by_the_agent = TurnSpan("assistant", 2, 3)
    last = TurnSpan("assistant", 3, 4, "stop", "r0")
    found = samples_of(
        rows(
            tmp_path,
            {"session_id": "a", "branch_id": "b0", "turns": [asked, answered, written_by_the_agent, last]},
            {"session_id": "b", "branch_id": "b0", "turns": [asked], "environment": "shop"},
            {"session_id": "a", "branch_id": "b1", "parent_branch_id": "b0", "shared_prefix": 2}
            | {"turns": [asked, answered]},
        ),
        iteration=0,
    )
    turns = found.turns
    assert (turns.rows.tolist(), turns.steps.tolist()) == ([0, 0, 2], [0, 1, 0])
    assert (turns.starts.tolist(), turns.ends.tolist()) == ([1, 3, 1], [2, 4, 2])
    assert turns.rewards.tolist() == [0.5, 0.0, 0.5]
    assert (found.parents.tolist(), found.shared.tolist()) == ([-1, -1, 0], [0, 0, 2])
    assert found.environments == ["calculator", "shop"]
    assert found.session_sum(found.logprobs).tolist() == [-4.0, -2.0]


def test_a_session_is_truncated_if_a_limit_ended_the_last_turn_of_one_of_its_rows(tmp_path: Path) -> None:
    found = samples_of(
        rows(
            tmp_path,
            {"session_id": "a", "turns": turns(None, "length", None, "stop")},
            {"session_id": "b", "turns": turns(None, "stop", None, "length")},
            {"session_id": "c", "turns": turns(None, "stop", None, None)},
            {"session_id": "d", "turns": turns(None, None, None, None)},
            {"session_id": "c", "turns": turns(None, "length", None, None), "branch_id": "c.1"},
        ),
        iteration=0,
    )
    assert found.truncated.tolist() == [False, True, True, False]
