"""Invariants 1 to 4 with two gateway processes, whatever happens to engines."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.sf_core.dataplane.stand import Server
from tests.sf_core.dataplane.turns.test_interruptions import (  # noqa: F401
    test_a_full_line_and_a_long_wait_are_refused_with_a_time_to_come_back,
    test_a_next_turn_goes_where_its_branch_is_cached,
    test_agents_see_whole_answers_and_the_record_is_exact,
)


@pytest.fixture(scope="module")
def server(patient: str, tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Iterator[Server]:
    with httpx.Client(base_url=patient, timeout=30) as http:
        yield Server(patient, http, tmp_path_factory.mktemp("runs"), model_dir)
