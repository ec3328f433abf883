"""`python -m sf_core.dataplane`: the data plane as a process of its own."""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from sf_core.config.environment import dataplane_key
from sf_core.dataplane.journal.journal import Fsync
from sf_core.dataplane.server import serve
from sf_core.dataplane.sessions.memory import MEMORY_MB
from sf_core.dataplane.turns.host import GRACE_S


def main() -> None:
    parser = argparse.ArgumentParser(prog="sf_core.dataplane", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--port-file", help="where to write the port once connections are accepted")
    parser.add_argument(
        "--journal-dir",
        help="of this process: a restart with the same folder serves its open runs again; also holds the "
        "journals of runs whose directory is not on a local disk",
    )
    parser.add_argument(
        "--fsync",
        choices=get_args(Fsync),
        default="turn",
        help="what is forced to disk before it is forwarded: whole turns, every chunk of a stream, or turns "
        "that end within 5 ms together",
    )
    parser.add_argument(
        "--grace-s", type=float, default=GRACE_S, help="how long a turn goes on after its client went away"
    )
    parser.add_argument(
        "--gateways",
        type=int,
        default=1,
        dest="num_gateways",
        help="processes that serve turns; 1: this one does everything",
    )
    parser.add_argument(
        "--memory-mb",
        type=float,
        default=MEMORY_MB,
        help="for sessions and results; above it nothing new is begun",
    )
    arguments = parser.parse_args()
    try:
        serve(**vars(arguments), key=dataplane_key())
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
