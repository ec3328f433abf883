"""What holds for every refusal: one clear sentence, and nothing done."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

MAX_LENGTH = 600
"""Most characters of a sentence; the longest one lists the allowed keys of a section."""

FOREIGN = re.compile(r"Traceback|File \"|<class |<function | object at 0x|pydantic|site-packages|datetime\.")
"""Text that only developers of the program understand."""


def check_sentence(text: str, *names: str) -> None:
    """One sentence on one line that names what is wrong: the file, key or field."""
    assert text.strip(), "nothing is said"
    assert "\n" not in text.strip(), f"more than one line: {text}"
    assert len(text) <= MAX_LENGTH, f"{len(text)} characters: {text[:200]}..."
    assert not re.search(r"[a-z][.!?] +[A-Z]", text), f"more than one sentence: {text}"
    assert not FOREIGN.search(text), f"not for people: {text}"
    missing = [name for name in names if name not in text]
    assert not missing, f"does not name {missing}: {text}"


def snapshot(folder: Path) -> dict[str, str]:
    """The contents of all files below a folder, by path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
