"""A full disk when the turns are in the journals of gateway processes."""

from __future__ import annotations

from tests.sf_core.dataplane.journal.test_full_disk import (
    test_a_session_that_ends_on_a_full_disk_is_finished_when_there_is_room,
    test_a_turn_that_cannot_be_recorded_is_refused_and_joined_when_it_is_asked_again,
)

__all__ = [
    "test_a_session_that_ends_on_a_full_disk_is_finished_when_there_is_room",
    "test_a_turn_that_cannot_be_recorded_is_refused_and_joined_when_it_is_asked_again",
]
