import pytest

from sf_core.agents.runner import _as_reward


def test_the_parts_of_a_reward_add_up_to_it() -> None:
    assert _as_reward({"correct": 1, "short": 0.25}) == (1.25, {"correct": 1.0, "short": 0.25})
    assert _as_reward(True) == (1.0, {})


@pytest.mark.parametrize("value", [float("nan"), {"a": 1.0, "b": float("inf")}])
def test_a_reward_that_is_no_finite_number_fails_its_session(value: object) -> None:
    with pytest.raises(ValueError, match="must be a finite number"):
        _as_reward(value)
