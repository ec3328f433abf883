"""Why devices compute nothing: device-seconds by what a device waits for.

weights    it stores, loads or switches
batch      it could train: it waits for a batch, and is not lent
tools      it serves, nothing runs on it, and a session that waits for a tool could
tail       the same without such a session: the last sessions of the batch run elsewhere
lag bound  the same, and no session runs at all: none may begin before the next version
failures   it is down
"""

from __future__ import annotations

from collections import Counter

Causes = Counter[str]


def causes_of_engines(num_idle: int, num_in_tools: int, is_sampling: bool) -> Causes:
    """Causes of engines on which nothing runs, one for each. `is_sampling`: a session runs on another one.

    >>> causes_of_engines(num_idle=3, num_in_tools=2, is_sampling=False)
    Counter({'tools': 2, 'tail': 1})
    """
    of_tools = min(num_idle, num_in_tools)
    others = "tail" if is_sampling or num_in_tools else "lag bound"
    return +Causes({"tools": of_tools, others: num_idle - of_tools})
