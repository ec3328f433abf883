"""Answers of two gateway processes are those of one."""

# ruff: noqa: F401
import pytest

from tests.sf_core.dataplane.gateway.test_endpoint import (
    test_bad_requests_get_a_sentence_in_the_shape_clients_expect,
    test_models_are_listed,
    test_tool_calls_and_their_results_make_one_token_sequence,
)
from tests.sf_core.dataplane.runs.test_run import serving, test_a_session_without_any_turn_counts_as_failed

# each starts three processes; that answers are those of one process, byte for byte, is shown in test_port.py
pytestmark = pytest.mark.nightly
