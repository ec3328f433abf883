"""How values are written in messages and tables."""

from __future__ import annotations

import re
from reprlib import Repr
from typing import Any


class _Shown(Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        # the repr of a date, which YAML can hold, is a Python call
        return str(x)[: self.maxother]


_SHOWN = _Shown()
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother = 3, 60, 60


def shown(value: Any) -> str:
    """The value on one line, with long strings and lists cut: a message about megabytes stays short.

    >>> shown("x" * 1000)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxx'"
    """
    return _SHOWN.repr(value)


def loading(share: float) -> str:
    """Suffix of a device's idle share: the share of time spent loading, empty below half a percent."""
    return f" ({share:.0%} loading)" if share >= 0.005 else ""


def is_word(value: str) -> str:
    """Returns a tag or a worker's name unchanged. Raises ValueError if Dask's `--resources` cannot hold it.

    >>> is_word("h20")
    'h20'
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError(f"{value!r} is no tag or name: use letters, digits, '.', '_' and '-'")
    return value
