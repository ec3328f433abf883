"""Sessions on disk with two gateway processes are served as with one."""

# ruff: noqa: F401
import pytest

from tests.sf_core.dataplane.journal.test_spilling import (
    server,
    session,
    test_a_retry_joins_the_answer_of_a_session_on_disk,
    test_a_session_that_ends_takes_its_file_along,
    test_a_session_whose_file_is_broken_is_an_error_and_then_another_attempt,
)
from tests.sf_core.dataplane.sharding.test_spilling import plane

# each starts three processes; a session is in one of them alone, whose code is that of the only one
pytestmark = pytest.mark.nightly
