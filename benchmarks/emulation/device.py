"""The device that a worker emulates: it is used for one tag at a time, and switching takes time.

Its figures are those that the worker declares, else those of the configuration.
"""

from __future__ import annotations

from benchmarks.emulation.device_model import DeviceModel
from benchmarks.emulation.engine import EmulatedEngine
from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice

MAX_SLEEP_S = 0.01
"""Longest sleep of an emulated engine: turns take seconds, and tens of engines share a core."""

STALL_S = 2.0
"""Steps may come this late, on a machine with more engines than cores; missed tokens are made up for."""

REPORT_EVERY = 256


def switch(device: WorkerDevice, tag: str, seconds: float) -> float:
    """Use the device for this tag from now on; returns the seconds that it takes, 0 if it was used for it."""
    was = device.tag
    device.tag = tag
    return 0.0 if was == tag else seconds


def make_engine(config: RunConfig, start_dir: str, device: WorkerDevice) -> EmulatedEngine:
    """The engine of this device."""
    model = DeviceModel(config.emulation, device.figures)
    return EmulatedEngine(
        model,
        report_every=REPORT_EVERY,
        weight_load_s=model.weight_load_s(),
        wake_s=lambda: switch(device, "rollout", model.to_rollout_s()),
        kv_tokens=config.emulation.kv_tokens,
        recompute=config.engine.kv_on_update == "recompute",
        max_sleep_s=MAX_SLEEP_S,
        stall_s=STALL_S,
    )
