"""What a run leaves in its directory, and what commands print of it as JSON: the paths, keys and columns of
every run. Numbers in names are written as N.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from sf_core.config import RunConfig
from sf_core.process.import_path import python_module
from tests.bench.snapshot.shapes import keys

NUMBER = re.compile(r"\d+")
BY_NAME = re.compile(
    r"(?:^|\.)(waits|runners|engines|inputs|settings|derived|failures|rejected|idle_by_cause|idle_fraction|facts"
    r"|by_environment|lags|tokens_of_engines|workers)(?:\[\])?\."
)
"""Begins keys that are names of workers, tasks, settings or causes."""
BY_CHANCE = re.compile(r"last_error$|: (?:lag_N|not_lent_\w+|to_\w+_s)$")
FOLDERS = ("manifests", "metrics", "batches", "checkpoints", "policy", "evaluations", "trajectories")
FILES = ("config.json", "flow.json", "summary.json", "summary.png", "timeline.json", "timeline.png")


def describe(config: RunConfig, file: Path, env: Mapping[str, str]) -> list[str]:
    """Lines about the directory of a run, which the file configures, and about what commands print of it."""
    lines = {*_files(Path(config.run_dir))}
    for command in (["ls"], ["inspect"], ["gc"]):
        lines.update(_printed([*command, config.run_dir, "--json"], file.parent, env))
    lines.update(_printed(["plan", str(file), "--json"], file.parent, env))
    return sorted(line for line in lines if not BY_CHANCE.search(line))


def _files(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*"):
        path = NUMBER.sub("N", file.relative_to(folder).as_posix())
        is_listed = path in FILES or path.startswith(FOLDERS)
        if not file.is_file() or not is_listed:
            continue
        yield path
        # flow.json is the same as config.json, before it was completed
        if file.suffix == ".json" and not path.startswith(("policy", "flow")):
            yield from (f"{path}: {key}" for key in _keys(json.loads(file.read_bytes())))
        elif path.startswith("metrics"):
            yield from (f"{path}: {NUMBER.sub('N', name)}" for name in pq.read_schema(file).names)


def _keys(value: Any) -> set[str]:
    return {NUMBER.sub("N", key) for key in keys(value) if not BY_NAME.search(key)}


def _printed(words: list[str], folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    text = subprocess.check_output(python_module("sf_core", *words), cwd=folder, env=dict(env))
    yield from (f"sf {words[0]} --json: {key}" for key in _keys(json.loads(text)))
