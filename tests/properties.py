"""How many examples a property is tried on: a third in `make test`, all of them in `make nightly`."""

import os


def examples(number: int) -> int:
    return number if os.environ.get("SF_EXAMPLES") == "all" else max(5, number // 3)
