"""Compares a snapshot with its file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "snapshot"
WRITE = "SNAPSHOT_WRITE"
"""Environment variable: write the files of a test anew instead of comparing them."""


def check(name: str, lines: Iterable[str]) -> None:
    """Raises AssertionError, with the differences, if these lines are not those of the file."""
    file = FOLDER / f"{name}.txt"
    lines = [*lines]
    if os.environ.get(WRITE):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return
    stored = file.read_text(encoding="utf-8").splitlines()
    if stored != lines:
        changes = "\n".join(difflib.unified_diff(stored, lines, "stored", "now", n=0, lineterm=""))
        raise AssertionError(
            f"what users have stored or typed no longer fits {file.name}: take the change back, or decide "
            f"on it (docs/decisions) and write the file anew with `python -m tests.snapshot`\n{changes}"
        )
