from typing import get_args

from sf_core.config.rollout_config import GateName
from sf_core.recipes.gates import GATES


def test_the_gates_are_those_that_a_configuration_can_name() -> None:
    assert [*GATES] == [*get_args(GateName)]


def test_a_group_of_equal_rewards_passes_only_where_all_do() -> None:
    for rewards, passes in (([1.0, 1.0], False), ([0.1 + 0.2, 0.3], False), ([0.0, 0.0, 1e-6], True)):
        assert GATES["all"](rewards).keep
        verdict = GATES["varied"](rewards)
        assert (verdict.keep, verdict.reason) == (passes, "" if passes else "equal_rewards")
