"""The supervisord process that `sf_core.cli.stack.supervisor` starts, with the arguments of supervisord. Its
parts end when it does, even by kill -9, and leave nothing behind.
"""

from __future__ import annotations

import os
from functools import partial

from sf_core.process.child_processes import MARK, end_marked, end_with
from storage.local import open_own


def main() -> None:
    from supervisor.supervisord import main as supervise

    refuse_links()

    # called in each part, because supervisord forks once for each
    os.register_at_fork(after_in_child=partial(end_with, os.getpid()))
    try:
        supervise()
    finally:
        end_marked(os.environ[MARK])


def refuse_links() -> None:
    """Have supervisord open no link as a log: in a folder where others may write, it leads to a file that
    they choose."""
    from supervisor import loggers

    loggers.open = partial(open, opener=partial(open_own, mode=0o644))


if __name__ == "__main__":
    main()
