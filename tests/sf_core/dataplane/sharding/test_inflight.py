"""Which request samples and which joins its turn, with two gateway processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.sf_core.dataplane.sharding.conftest import wait_until_let_go
from tests.sf_core.dataplane.turns.test_retries import (  # noqa: F401
    Agent,
    agent_of,
    test_a_request_sent_again_after_its_connection_broke_joins_the_turn,
    test_a_retry_joins_although_the_first_connection_looks_alive,
    test_a_retry_of_several_samples_gets_the_same_ones,
    test_an_answer_nobody_got_is_not_trained,
    test_an_answer_that_its_client_did_not_wait_for_is_given_to_the_next_one,
    test_an_idempotency_key_stands_for_one_sample,
)


@pytest.fixture
def agent(patient: str, tmp_path: Path, model_dir: str, renderer: Renderer) -> Iterator[Agent]:
    with agent_of(patient, tmp_path, model_dir, renderer) as agent:
        yield agent
    wait_until_let_go(patient)
