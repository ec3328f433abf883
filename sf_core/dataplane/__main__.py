"""`python -m sf_core.dataplane`: the data plane as a process of its own."""

from __future__ import annotations

import argparse
import sys

from sf_core.dataplane.server import serve
from sf_core.settings import dataplane_key


def main() -> None:
    parser = argparse.ArgumentParser(prog="sf_core.dataplane", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--port-file", help="where to write the port once connections are accepted")
    parser.add_argument("--journal-dir", help="for runs whose directory is not on a local disk")
    arguments = parser.parse_args()
    try:
        serve(**vars(arguments), key=dataplane_key())
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
