"""Whether the disk of a run has room for what the run will write there."""

from __future__ import annotations

import shutil

from sf_core.config import RunConfig
from sf_core.stages.preflight.sizes import PolicySizes, disk_bytes, gb
from storage.files import absolute, folder_bytes, is_local
from storage.run_directory import RunDirectory

_PARTS = ("start", "weights", "checkpoints", "policy")
"""Folders of a run directory that the estimate counts."""


def check_disk(config: RunConfig, sizes: PolicySizes | None) -> None:
    """Raises ValueError, one sentence, if `describe_lack` has one."""
    if lack := describe_lack(config, sizes):
        raise ValueError(lack)


def describe_lack(config: RunConfig, sizes: PolicySizes | None) -> str:
    """What the disk of `storage.root` lacks, as one sentence; empty if it has room for the weights and
    checkpoints that are still to be written. Also empty if the room cannot be measured, as in an object
    store, or the size of the policy is unknown."""
    root = config.storage.root
    if sizes is None or not is_local(root):
        return ""
    try:
        free = shutil.disk_usage(absolute(root)).free
    except OSError:
        return ""
    written = 0
    if config.run_id is not None:
        run = RunDirectory(config.run_dir)
        written = sum(folder_bytes(run.path(part)) for part in _PARTS)
    needed = disk_bytes(sizes) - written
    if needed <= free:
        return ""
    more = " more" if written else ""
    return (
        f"the disk of storage.root {absolute(root)} has {gb(free)} free, but the run needs about "
        f"{gb(needed)}{more} for weights and checkpoints: free space, set storage.root to a folder "
        "on another disk, or lower train.keep_checkpoints, train.keep_weights or train.iterations"
    )
