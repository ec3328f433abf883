"""Lock on the local folder of a run: one command at a time works there; a second one is told which it is."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from storage.run_directory import RunDirectory


class HeldError(ValueError):
    """Another command works in the folder; the message says which, and what to do."""


def hold(run: RunDirectory) -> TextIO:
    """Lock the run's local folder, which exists, against other commands until the returned file is closed or
    this process ends. Raises HeldError. On a filesystem without locks it has no effect."""
    file = open(Path(run.local_dir, "command.lock"), "a+")  # noqa: SIM115 the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = _holder(file.read())
        file.close()
        raise HeldError(
            f"run {run.run_id} is in use by {holder}: wait until that command ends, or stop that command "
            "with Ctrl-C, and run this command again; to start a new run instead, add --set run_id=NAME"
        ) from None
    except OSError:
        return file
    file.truncate(0)
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}, file)
    file.flush()
    return file


def _holder(facts: str) -> str:
    # the holder may not have written its facts yet
    with suppress(ValueError, KeyError, TypeError):
        read = json.loads(facts)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(read["since"]))
        return f"another command, process {read['pid']} on {read['host']} since {since}"
    return "another command"
