"""What a page shows, copied from its text, and whether a finished run has learned."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

MOST_BEFORE = 0.5
LEAST_AFTER = 0.8
"""Bounds of the held-out reward of an example: at most before the training, and at least after it."""


def copy_example(page: str, folder: Path, **files: str) -> None:
    """Write the first block of each of these languages on a page into the file of its name, word by word."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for language, name in files.items():
        block = re.search(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
        assert block is not None, f"{page} shows no {language}"
        (folder / name).write_text(block[1], encoding="utf-8")


def check_learning(run: Path) -> None:
    """Check that the held-out reward of a finished run rose as that of an example must."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    before = summary["reward_before"]
    after = summary["reward_after"]
    assert before <= MOST_BEFORE and after >= LEAST_AFTER, f"{run.name}: {before:.3f} to {after:.3f}"
