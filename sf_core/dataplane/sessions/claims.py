"""The claim on a session of a group, and the ids of sessions."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Split = Literal["train", "holdout"]


ExternalMode = Literal["group", "log"]
"""How an external session counts. Its agent opens it by itself, so that no runner is given it.

group: it has a place in a training group or an evaluation, for which it counts. Its claim says that it is
    external.
log: it has no place, and so no claim, or its group no longer counts. Its rows are stored by themselves, and
    nothing is trained on them.

In both modes, the run neither chooses its task nor asks judges for it, and its reward may follow its answer.
In a training group it has one attempt. Its failures do not end the run. When the run starts over, its group
is rejected, while the session itself goes on. A request that names no session gets an external one of its
own, which ends with its answer and is not stored.
"""


class SessionSlot(NamedTuple):
    """The slot of a session in its run. A held-out evaluation is one group: its index is the policy version,
    its members are the tasks."""

    split: Split
    group: int
    member: int


class Claim(NamedTuple):
    """A session given to a runner, or to an external agent."""

    slot: SessionSlot
    attempt: int
    """Number of earlier claims on the slot."""
    draw: int = 0
    """Number of earlier claims that failed. Part of the sampling seed: after a failure that the policy may
    have caused, other tokens are sampled; after the loss of a runner, the same tokens."""
    is_external: bool = False
    """Whether the session was given to an external agent, see ExternalMode."""

    def session_id(self, run_id: str) -> str:
        letter = "g" if self.slot.split == "train" else "e"
        return f"{run_id}.{letter}{self.slot.group}.{self.slot.member}.a{self.attempt}"


def is_external(claim: Claim | None) -> bool:
    """Whether the session of this claim, or without one, is external, see ExternalMode."""
    return claim is None or claim.is_external


_IN_RUN = re.compile(r"\.(?:[ge]\d+\.\d+\.a\d+|open\.\w+)\Z")


def run_of(session_id: str) -> str:
    """Id of the run to which a session of this id belongs. The id of a run may begin like a session of
    another run, as with the runs `a.g0` and `a`. Anything but the id of a session is returned unchanged."""
    return _IN_RUN.sub("", session_id)
