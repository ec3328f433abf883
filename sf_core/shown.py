"""How a wrong value is shown in the sentence that refuses it."""

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
