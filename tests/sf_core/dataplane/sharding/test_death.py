"""Invariants 4 and 9 with a hub and two gateway processes: any of them is killed with SIGKILL, under agents
that hold an OpenAI client and nothing else."""

from __future__ import annotations

import psutil
import pytest

from sf_core.dataplane.chat.renderer import Renderer

# the hub is killed in these, and all gateways end with it
from tests.sf_core.dataplane.runs.test_recovery import (  # noqa: F401
    Restarts,
    agents_see_whole_answers,
    test_a_session_that_an_agent_opened_survives_a_restart_until_it_is_finished,
    test_killed_at_random_moments_agents_see_whole_answers_and_the_record_is_exact,
    test_killed_at_random_moments_what_agents_opened_is_stored_once,
)


def gateways() -> list[psutil.Process]:
    """Running gateway processes; the children also include ended processes of other tests."""
    children = psutil.Process().children(recursive=True)
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "sf_core.dataplane.sharding.process" in child.cmdline()]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_gateways_killed_at_random_moments_agents_see_whole_answers_and_the_record_is_exact(
    plane: Restarts, renderer: Renderer, seed: int
) -> None:
    agents_see_whole_answers(plane, renderer, seed, lambda moments: moments.choice(gateways()).kill())
