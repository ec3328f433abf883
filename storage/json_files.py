"""What is wrong with a JSON file that we wrote ourselves and cannot read back."""

from __future__ import annotations

from pydantic import ValidationError


def first_fault(error: ValidationError) -> str:
    """Where, if inside of something, and what; one sentence without its end."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    what = first["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what
