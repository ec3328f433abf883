"""Which session of which group a runner was given, and how a journal has it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Split = Literal["train", "holdout"]


class Place(NamedTuple):
    """Where a session belongs. A held-out evaluation is one group: its index is the policy version, its
    members are the tasks."""

    split: Split
    group: int
    member: int


class Claim(NamedTuple):
    """A session given to a runner."""

    place: Place
    attempt: int
    """How often the place was given out before."""
    draw: int = 0
    """How many of those failed. It is part of what every draw depends on: what the policy may have caused is
    tried with others, what was lost with the same."""

    def session_id(self, run_id: str) -> str:
        letter = "g" if self.place.split == "train" else "e"
        return f"{run_id}.{letter}{self.place.group}.{self.place.member}.a{self.attempt}"


def claim_value(claim: Claim) -> list[Any]:
    return [*claim.place, claim.attempt, claim.draw]


def read_claim(value: list[Any]) -> Claim:
    # in journals of earlier versions no claim has a number of its draw
    split, group, member, attempt, *draw = value
    return Claim(Place(split, group, member), attempt, *draw)
