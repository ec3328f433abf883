"""Dask preload of every worker: decides where it imports from, imports what its tags need, tells the
scheduler which device it has, makes log lines printable, and sets up what it keeps.

Its options come last: `dask worker ... --preload sf_core.scheduling.preload --device-kind h100`.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from typing import Any

import click
from distributed.system import MEMORY_LIMIT

from sf_core.config.devices import Device, find_device
from sf_core.process.environment_variables import computes_nothing
from sf_core.process.import_path import import_from, user_folders
from sf_core.process.user_code import clean_logs
from sf_core.scheduling.plan import COMPUTING, worker_of
from sf_core.scheduling.template.nanny import heavy_modules
from sf_core.scheduling.worker_state import PLUGIN, WorkerState


def _kind(context: click.Context, option: click.Parameter, value: str | None) -> Device | None:
    try:
        return find_device(value) if value else None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option("--device-kind", callback=_kind, help="What the device is; see sf_core/config/devices.py.")
@click.option("--device", help="The same as figures: a roofline Device in JSON.")
async def dask_setup(worker: Any, device_kind: Device | None, device: str | None) -> None:
    import_from(user_folders())
    clean_logs()
    for module in heavy_modules(worker.state.total_resources):
        importlib.import_module(module)
    own_device = Device(**json.loads(device)) if device else device_kind
    published = asdict(own_device) if own_device else None
    resources = worker.state.total_resources
    memory, is_shared = _device_memory() if COMPUTING & resources.keys() else (None, False)
    shared_host = worker.ip if is_shared and own_device is None else None
    # sent with every registration; the scheduler shows it in scheduler_info
    worker.startup_information |= {
        "device": lambda _: published,
        "memory": lambda _: memory,
        "shared_host": lambda _: shared_host,
    }
    state = WorkerState(worker_of({"resources": resources}).name, worker.ip, own_device)
    await worker.plugin_add(state, name=PLUGIN)


def _device_memory() -> tuple[int | None, bool]:
    """Memory of the worker's device in bytes, and whether the device is the host's CPU, which others use too;
    None if workers compute nothing (SF_EMULATED)."""
    if computes_nothing():
        return None, False
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory), False
    return int(MEMORY_LIMIT), True
