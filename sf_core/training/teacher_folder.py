"""The folder that `train.teacher.model` names, and versions of runs as Hugging Face folders on this host."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from sf_core.reports.view import RunView
from sf_core.training.policy_folder import check_weights_folder, policy_folder
from storage.files import describe, join, list_files, local_folder
from storage.run_directory import RunDirectory
from storage.scratch import scratch_folder
from storage.tensors.weight_delta import FILE_NAME as DELTA
from storage.tensors.weights import ADAPTER_CONFIG, WEIGHT_FILES, has_weights

SETTING = "train.teacher.model"

_VERSION = re.compile(r"(.+)@(\d+)")


@dataclass(frozen=True, slots=True)
class TeacherFolder:
    """A causal LM that is held and not trained."""

    source: str
    """Hugging Face folder."""
    weights: str | None = None
    """Folder of the weights that replace those of `source`."""
    adapter: str | None = None
    """Folder of an adapter that the weights are taken with."""

    @contextmanager
    def open(self) -> Iterator[tuple[str, str | None]]:
        """A Hugging Face folder on this host with the weights, and that of the adapter or None."""
        adapter = None if self.adapter is None else local_folder(self.adapter)
        if self.weights is None:
            yield local_folder(self.source), adapter
            return
        source, weights = local_folder(self.source, WEIGHT_FILES), local_folder(self.weights)
        with scratch_folder() as folder:
            for path in (*Path(source).iterdir(), *Path(weights).iterdir()):
                if path.is_file() and (path.parent == Path(weights)) == _is_weights(path.name):
                    Path(folder, path.name).symlink_to(path)
            yield folder, adapter

    def digest(self) -> str:
        """SHA-256 over names and contents of the weights and the configuration of the model."""
        uris = [join(self.source, "config.json")]
        uris += [uri for uri in list_files(self.weights or self.source) if _is_weights(_name_of(uri))]
        if self.adapter is not None:
            uris += [uri for uri in list_files(self.adapter) if _is_weights(_name_of(uri))]
            uris.append(join(self.adapter, ADAPTER_CONFIG))
        lines = sorted(f"{_name_of(uri)} {describe(uri).sha256}" for uri in uris)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def find_teacher(model: str) -> TeacherFolder:
    """The teacher that `train.teacher.model` names: a folder, one that `sf model` has made, or RUN@VERSION.
    Raises ValueError, one sentence, if it is none of them or its weights cannot be loaded."""
    found = None if Path(model).exists() else _VERSION.fullmatch(model)
    if found is None:
        folder = policy_folder(model)
        check_weights_folder(folder, SETTING)
        return TeacherFolder(folder)
    if not (run := RunDirectory(found[1])).exists():
        raise ValueError(f"{SETTING}: {model} is no version of a run: {run.uri} has no config.json")
    try:
        RunView(run).weights_of(int(found[2]))
    except ValueError as error:
        raise ValueError(f"{SETTING}: {error}") from None
    return version_of(run, int(found[2]))


def version_of(run: RunDirectory, version: int) -> TeacherFolder:
    """A version of a run, whose weights must be there."""
    if has_weights(run.start_adapter_dir):
        return TeacherFolder(run.start_dir, adapter=run.version_dir(version))
    return TeacherFolder(run.start_dir, weights=run.weights_dir(version) if version else None)


def _name_of(uri: str) -> str:
    return uri.rsplit("/", 1)[-1]


def _is_weights(name: str) -> bool:
    return name != DELTA and any(fnmatch(name, pattern) for pattern in WEIGHT_FILES[:2])
