"""How values look in sentences and tables for people."""

from __future__ import annotations

from reprlib import Repr
from typing import Any


class _Shown(Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        # YAML knows dates, which Python writes as it would make them
        return str(x)[: self.maxother]


_SHOWN = _Shown()
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother = 3, 60, 60


def shown(value: Any) -> str:
    """On one line, long strings and lists cut: whoever sent megabytes gets a sentence back.

    >>> shown("x" * 1000)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxx'"
    """
    return _SHOWN.repr(value)


def loading(share: float) -> str:
    """What stands behind the idle share of a device: how much of the time it loaded, where that is seen."""
    return f" ({share:.0%} loading)" if share >= 0.005 else ""
