"""The device that this process pretends to have: one active tag at a time, and switching takes time.

It is what the worker said of its device, else that of the configuration.
"""

from __future__ import annotations

import time

from sf_core.config import RunConfig
from sf_core.config.devices import Device
from sf_core.engines.device_model import DeviceModel
from sf_core.engines.emulated import EmulatedEngine

MAX_SLEEP_S = 0.01
"""An emulated engine looks for requests this often: a hundredth of a second in turns of seconds, and tens of
engines share a core."""

STALL_S = 2.0
"""On a machine with more engines than cores a step may come late; what it missed is made up for."""

REPORT_EVERY = 256

own_device: Device | None = None
"""What this process's worker says of its device; None: as the configuration has it."""

_active: str | None = None


def device_model(config: RunConfig) -> DeviceModel:
    return DeviceModel(config.emulation, own_device)


def switch_to(tag: str, seconds: float) -> None:
    """Sleeps as long as the switch takes; not at all if the device holds the tag already."""
    global _active
    if _active != tag:
        time.sleep(seconds)
        _active = tag


def emulated_engine(config: RunConfig, version: int) -> EmulatedEngine:
    """The engine of this process's device, once its weights are in."""
    model = device_model(config)
    switch_to("rollout", model.to_rollout_s(version))
    return EmulatedEngine(
        model,
        version=version,
        report_every=REPORT_EVERY,
        weight_load_s=model.weight_load_s(),
        kv_tokens=config.emulation.kv_tokens,
        recompute=config.engine.kv_on_update == "recompute",
        max_sleep_s=MAX_SLEEP_S,
        stall_s=STALL_S,
    )
