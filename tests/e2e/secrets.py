"""Secrets in the environment of all processes of a run, and a search for them in all its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

PLANTED = {
    "SF_DATAPLANE_KEY": "planted-key-of-the-data-plane",
    "SF_RUN_KEY": "planted-key-of-the-run",
    "AWS_ACCESS_KEY_ID": "PLANTEDAKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "planted/secret+of-the-storage",
    "OPENAI_API_KEY": "sk-planted-key-of-another-api",
    "WANDB_API_KEY": "planted-key-of-the-tracker",
}


def leaks(folder: Path, secrets: dict[str, str]) -> list[tuple[str, str]]:
    """(secret, file) for each secret found in a file: logs, databases, manifests, Parquet and all others."""
    found = [(path, content) for path in folder.rglob("*") for content in _contents(path)]
    return [
        (name, str(path.relative_to(folder)))
        for path, content in found
        for name, secret in secrets.items()
        if secret.encode() in content and not _may_hold(path, name)
    ]


def _contents(path: Path) -> Iterator[bytes]:
    if path.is_file():
        yield path.read_bytes()
        if path.suffix == ".parquet":
            # compressed: the bytes alone would show nothing
            yield repr(pq.read_table(path).to_pylist()).encode()


def _may_hold(path: Path, name: str) -> bool:
    """Whether a file may hold a secret: the journal, readable by its owner only, holds the run's key."""
    is_private = path.stat().st_mode & 0o077 == 0
    return name == "SF_RUN_KEY" and path.suffix == ".journal" and is_private
