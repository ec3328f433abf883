"""The device that this process emulates: it has one active tag at a time, and switching takes time.

Its figures are those that the worker declares, else those of the configuration.
"""

from __future__ import annotations

import time

from sf_core.config import RunConfig, devices
from sf_core.engines.device_model import DeviceModel
from sf_core.engines.emulated import EmulatedEngine
from sf_core.types import WeightsRef

MAX_SLEEP_S = 0.01
"""Longest sleep of an emulated engine: turns take seconds, and tens of engines share a core."""

STALL_S = 2.0
"""Steps may come this late, on a machine with more engines than cores; missed tokens are made up for."""

REPORT_EVERY = 256

_active: str | None = None


def device_model(config: RunConfig) -> DeviceModel:
    return DeviceModel(config.emulation, devices.own_device)


def switch_to(tag: str, seconds: float) -> None:
    """Sleep as long as the switch takes; not at all if the device holds the tag already."""
    global _active
    if _active != tag:
        time.sleep(seconds)
        _active = tag


def make_engine(config: RunConfig, start_dir: str, weights: WeightsRef) -> EmulatedEngine:
    """The engine of this process's device, after the time that switching and loading take."""
    model = device_model(config)
    switch_to("rollout", model.to_rollout_s(weights.version))
    return EmulatedEngine(
        model,
        version=weights.version,
        report_every=REPORT_EVERY,
        weight_load_s=model.weight_load_s(),
        kv_tokens=config.emulation.kv_tokens,
        recompute=config.engine.kv_on_update == "recompute",
        max_sleep_s=MAX_SLEEP_S,
        stall_s=STALL_S,
    )
