"""What the rules on a group's sessions do to synthetic sessions, under the real rollout manager."""

from __future__ import annotations

import pytest

from benchmarks.group_sessions import LEAST, lengths_with, lost_share


def test_groups_that_may_do_with_fewer_are_not_lost() -> None:
    assert lost_share(LEAST, batches=40) < 0.05 < 0.25 < lost_share(None, batches=40)


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_eight_sessions_of_a_group_count(spare: int) -> None:
    found = lengths_with(spare, 0.6, batches=5)
    assert found.num_counted == 8 * found.groups == 8 * 5 * 16


def test_spare_sessions_save_time_and_leave_out_long_ones() -> None:
    found = lengths_with(1, 1.2, batches=40).over(lengths_with(0, 1.2, batches=40))
    assert found["time"] < 0.7 and found["share_of_longest_tenth"] < 0.5
