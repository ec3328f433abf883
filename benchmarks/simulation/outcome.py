"""What a simulated run leaves: its iterations, and the timeline of its devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.simulation.idle import Causes
from sf_core.scheduling.timeline import Span


@dataclass(frozen=True, slots=True)
class SimulatedIteration:
    start: float
    end: float
    """Start and end are those of a real run's windows: the end of the iteration before, and its own."""
    tokens: int
    max_lag: int
    idle: Causes
    """Device-seconds in which devices computed nothing, by cause."""


@dataclass(slots=True)
class Simulated:
    iterations: list[SimulatedIteration] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    """Sorted by worker and time."""
    not_lent: int = 0
    """Loans that the gate refused."""
    moves: int = 0
    """Sessions moved from a long queue to a short one."""
    failures: int = 0
