"""Processes of a Dask worker: the nanny, its child the template, and the worker, a fork of the template."""

from __future__ import annotations

from contextlib import suppress

import psutil


def template_of(nanny: int) -> psutil.Process | None:
    """The template of the nanny with this process id; None if it has none at the moment."""
    # one that has just ended cannot be asked
    with suppress(psutil.Error):
        for child in psutil.Process(nanny).children():
            with suppress(psutil.Error):
                if any("multiprocessing.forkserver" in word for word in child.cmdline()):
                    return child
    return None


def worker_of(nanny: int) -> psutil.Process | None:
    """The process that runs the worker's tasks; None while there is none."""
    with suppress(psutil.Error):
        if template := template_of(nanny):
            # one that was killed stays a zombie until the template has looked
            alive = [child for child in template.children() if child.status() != psutil.STATUS_ZOMBIE]
            return alive[0] if alive else None
    return None
