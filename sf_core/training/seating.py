"""How a rank takes its seat in a gang and waits for the others. What they exchange is their backend's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from sf_core.training.gang import GangError, RankAssignment, SupersededError
from storage.gangs import GangFiles

T = TypeVar("T")

POLL_S = 0.02
FILES_POLL_S = 1.0
"""Time between looks at whether the flow has ended the try, which may be requests to an object store."""

Meet = Callable[[GangFiles, RankAssignment, str, float], AbstractContextManager[T]]


@contextmanager
def seated(meet: Meet[T], files: GangFiles, seat: RankAssignment, host: str, timeout_s: float) -> Iterator[T]:
    """Take a seat, meet the other ranks, run the block; ends when rank 0 has finished it.

    `meet` is that of a TrainerBackend, `host` the address of this worker. Raises SupersededError if this rank
    must not work, GangError if another one is missing or has failed, and what the block raises."""
    if files.is_over() or not files.take_seat(seat.rank, once=not seat.is_alone):
        raise SupersededError(f"{seat.label}: try {seat.epoch} had begun here before, or is over")
    with meet(files, seat, host, timeout_s) as ranks:
        yield ranks


def wait_for(
    files: GangFiles,
    seat: RankAssignment,
    look: Callable[[], T | None],
    missing: Callable[[], list[int]],
    what: str,
    timeout_s: float,
) -> T:
    """Look until there is something, and return it. Raises GangError if the flow has ended the try, or after
    `timeout_s`; then it says of the `missing` ranks `what` they have not done."""
    deadline, files_looked_at = time.monotonic() + timeout_s, -FILES_POLL_S
    while (found := look()) is None:
        now = time.monotonic()
        if now > files_looked_at + FILES_POLL_S:
            files_looked_at = now
            if files.is_over():
                raise GangError(f"{seat.label}: the flow ended try {seat.epoch}")
        if now > deadline:
            raise seat.blame(missing(), f"{what} within {timeout_s:g} s")
        time.sleep(POLL_S)
    return found
