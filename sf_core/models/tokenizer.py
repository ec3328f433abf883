"""The tokenizer that a run started from, read from the run directory alone.

Uses tokenizers directly, because transformers imports torch: 3 s.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from storage import files
from storage.errors import StorageError
from storage.run_directory import RunDirectory


def open_tokenizer(run: RunDirectory) -> Tokenizer | None:
    """The run's tokenizer; None for a run without one, like those of the scripted engine. Raises ValueError
    if its file cannot be read."""
    file = files.join(run.start_dir, "tokenizer.json")
    return load_tokenizer(file) if files.exists(file) else None


def load_tokenizer(file: str) -> Tokenizer:
    """The tokenizer of a file. Raises ValueError if it cannot be read."""
    try:
        return Tokenizer.from_str(files.read_bytes(file).decode())
    except StorageError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
