"""Packages of others that have the names of ours."""

from __future__ import annotations

from pathlib import Path

from sf_core.process.import_path import NAMES


def make_namesakes(folder: Path, *names: str) -> None:
    """Put packages of these names, by default another copy of ours, into the folder. To import one fails."""
    for name in names or NAMES:
        (folder / name).mkdir(parents=True)
        code = f"raise ImportError('{name} of {folder} was imported')\n"
        (folder / name / "__init__.py").write_text(code, encoding="utf-8")
    if not names:
        (folder / "sf_core" / "environment_variables.py").write_text("", encoding="utf-8")
