"""Time that orchestration takes beside the devices, as the simulator assumes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of orchestration, on the clock of the machine: no time dilation."""

    seal: float = 0.2
    """Time from a full batch to its stored rows, filter included."""
    hand_over: float = 0.3
    """Time from the stored batch until training may begin: revoking, yielding, the start of the ranks."""
    lease: float = 0.3
    """Time from the end of training until the next lease begins to load."""
    publish: float = 0.3
    """Time from the end of training until engines begin to load the new version, beside reading it once."""
    next_iteration: float = 0.5
    """Time from one iteration's end until the next one may seal its batch."""
