"""The tokenizer that a run started from, read from the run directory alone.

Uses tokenizers directly, because transformers imports torch: 3 s.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from storage import files
from storage.run_directory import RunDirectory


def open_tokenizer(run: RunDirectory) -> Tokenizer | None:
    """The run's tokenizer; None for a run without one, like those of the scripted engine."""
    file = files.join(run.start_dir, "tokenizer.json")
    return Tokenizer.from_str(files.read_bytes(file).decode()) if files.exists(file) else None
