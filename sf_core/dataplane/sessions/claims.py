"""Names the session of a group that a runner was given."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Split = Literal["train", "holdout"]


class SessionSlot(NamedTuple):
    """The place of a session in its run. A held-out evaluation is one group: its index is the policy version,
    its members are the tasks."""

    split: Split
    group: int
    member: int


class Claim(NamedTuple):
    """A session given to a runner, or to an agent outside."""

    place: SessionSlot
    attempt: int
    """Number of times that the place was given out before."""
    draw: int = 0
    """Number of those that failed. Part of the sampling seed: after a failure that the policy may have caused
    other tokens are sampled, after a loss the same ones."""
    is_outside: bool = False
    """Whether it was given to an agent that came by itself, which no runner runs."""

    def session_id(self, run_id: str) -> str:
        letter = "g" if self.place.split == "train" else "e"
        return f"{run_id}.{letter}{self.place.group}.{self.place.member}.a{self.attempt}"


_IN_RUN = re.compile(r"\.(?:[ge]\d+\.\d+\.a\d+|open\.\w+)\Z")


def run_of(session_id: str) -> str:
    """Id of the run in whose sessions this id can be. The id of a run may begin like a session of another, as
    those of the runs `a.g0` and `a`. What is the id of no session is returned unchanged."""
    return _IN_RUN.sub("", session_id)
