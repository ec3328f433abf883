"""Why devices compute nothing: device-seconds by what a device waits for.

weights    it stores, loads or switches
batch      it could train: it waits for a batch, and is not lent
tools      it serves, nothing runs on it, and a session that waits for a tool could
tail       the same without such a session: the last sessions of the batch run elsewhere
lag bound  the same, and no session runs at all: none may begin before the next version
failures   it is down
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

Causes = dict[str, float]


def causes_of_engines(num_idle: int, num_in_tools: int, is_sampling: bool) -> Causes:
    """Causes of engines on which nothing runs, one for each. `is_sampling`: a session runs on another one.

    >>> causes_of_engines(num_idle=3, num_in_tools=2, is_sampling=False)
    {'tools': 2, 'tail': 1}
    """
    of_tools = min(num_idle, num_in_tools)
    others = "tail" if is_sampling or num_in_tools else "lag bound"
    counted: Causes = {"tools": of_tools, others: num_idle - of_tools}
    return {cause: number for cause, number in counted.items() if number}


def added_up(causes: Iterable[Causes]) -> Causes:
    """The largest first."""
    total: Causes = defaultdict(float)
    for each in causes:
        for cause, seconds in each.items():
            total[cause] += seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))
