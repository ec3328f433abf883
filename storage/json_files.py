"""Describes why a JSON file of ours cannot be read back."""

from __future__ import annotations

from pydantic import ValidationError


def first_fault(error: ValidationError) -> str:
    """The first error and, if it is in a field, the path of that field; one sentence without a full stop."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    what = first["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what
