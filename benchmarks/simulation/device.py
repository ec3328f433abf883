"""A device of a simulated run, and how devices fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.emulation.device_model import DeviceModel
from benchmarks.simulation.fleet import SimulatedEngine
from sf_core.scheduling.lending import LendingGate


@dataclass(frozen=True, slots=True)
class Failures:
    """Devices die at random moments and come back."""

    mean_between_s: float
    """Mean time between failures of one device, in seconds of the clock."""
    repair_s: float


@dataclass(eq=False, slots=True)
class SimulatedDevice:
    """A worker's device, with the state of the worker's process, which a failure ends."""

    worker: str
    model: DeviceModel
    gate: LendingGate
    tag: Literal["rollout", "train"] | None = None
    """Tag of the last switch."""
    leased_at: float | None = None
    """When its current lease began; None without one."""
    engine: SimulatedEngine | None = None
    """Engine of the current lease; None without one, and while it loads."""
    is_down: bool = False
    num_lives: int = 0
    num_leases: int = 0
    computes: tuple[float, float] = (0.0, 0.0)
    """When its share of the last train step begins and ends."""
    first_lease: int = 1
    """Number of the first lease of the process; its start is no switch, as what it starts stays."""
