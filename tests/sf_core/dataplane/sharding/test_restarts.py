"""Kills of the hub at chosen moments, with two gateway processes."""

# ruff: noqa: F401
import pytest

from tests.sf_core.dataplane.runs.test_recovery import (
    test_a_restarted_process_goes_on_without_its_flow,
    test_an_answer_that_did_not_arrive_is_given_again_after_a_restart,
)

# each starts six processes; test_death.py kills at moments of all kinds
pytestmark = pytest.mark.nightly
