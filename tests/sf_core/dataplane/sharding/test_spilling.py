"""Two gateway processes whose sessions do not fit their memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.sf_core.dataplane.journal.test_spilling import (  # noqa: F401
    Plane,
    test_memory_stays_below_its_bound_under_many_sessions,
    test_the_tree_the_reasons_and_the_rest_of_the_conversation_are_as_if_it_had_stayed,
)
from tests.sf_core.dataplane.sharding.conftest import TWO
from tests.sf_core.dataplane.stand import running_process


def in_three_processes(memory_mb: float, folder: Path) -> AbstractContextManager[str]:
    options = ("--memory-mb", str(memory_mb), "--grace-s", "30")
    return running_process(folder / "port", 0, *TWO, *options)


@pytest.fixture
def plane() -> Plane:
    return in_three_processes
