"""The folder that `train.teacher.model` names, and versions of runs as Hugging Face folders on this host."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tokenizers import Tokenizer

from sf_core.models.adapter import list_linears, read_adapter, shape_factors
from sf_core.models.context import count_ids
from sf_core.models.images.processor_config import MULTIMODAL_MODEL_TYPES
from sf_core.models.pretrained.needed_weights import check_weights
from sf_core.models.tokenizer import load_tokenizer
from sf_core.reports.view import RunView
from sf_core.training.policy_folder import check_weights_folder, policy_folder, read_model_config
from storage.files import describe, exists, join, list_files, local_folder
from storage.run_directory import RunDirectory
from storage.scratch import scratch_folder
from storage.tensors.tensor_bytes import find_difference
from storage.tensors.weight_delta import FILE_NAME as DELTA
from storage.tensors.weights import ADAPTER_CONFIG, WEIGHT_FILES, has_weights, open_weights

SETTING = "train.teacher.model"

OF_A_RUN = "use another version, or restore the file from a copy"
"""What to do about a version of a run that lacks weights."""

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
        source = local_folder(self.source, WEIGHT_FILES)
        weights = local_folder(self.weights)
        with scratch_folder() as folder:
            for path in (*Path(source).iterdir(), *Path(weights).iterdir()):
                if path.is_file() and (path.parent == Path(weights)) == _is_weights(path.name):
                    Path(folder, path.name).symlink_to(path)
            yield folder, adapter

    def check(self, setting: str, remedy: str) -> None:
        """Raises ValueError, one sentence that names the setting and ends with the remedy, if weights or
        factors are not all those of the model."""
        shape = read_model_config(self.source, setting)
        weights = self.weights or self.source
        check_weights(shape, weights, setting, part=self.weights is not None, remedy=remedy)
        if weights != self.source and shape.get("model_type") in MULTIMODAL_MODEL_TYPES:
            # versions leave the tower to the folder of version 0
            check_weights(shape, self.source, setting, remedy=remedy)
        if self.adapter is not None:
            try:
                needed = shape_factors(read_adapter(self.adapter), list_linears(shape))
                fault = find_difference(open_weights(self.adapter)[0].shapes, needed)
            except (ValueError, OSError) as error:
                raise ValueError(f"{setting}: {error}") from None
            if fault:
                raise ValueError(f"{setting}: {self.adapter}: {fault}: {remedy}")

    def digest(self) -> str:
        """SHA-256 over names and contents of the weights and the configuration of the model."""
        folders = [self.weights or self.source]
        uris = [join(self.source, "config.json")]
        if self.adapter is not None:
            folders.append(self.adapter)
            uris.append(join(self.adapter, ADAPTER_CONFIG))
        for folder in folders:
            uris += [uri for uri in list_files(folder) if _is_weights(_name_of(uri))]
        lines = sorted(f"{_name_of(uri)} {describe(uri).sha256}" for uri in uris)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def is_here(model: str) -> bool:
    """Whether the folder or the run that `train.teacher.model` names is on this host."""
    match = _VERSION.fullmatch(model)
    return Path(policy_folder(model)).is_dir() or (match is not None and RunDirectory(match[1]).exists())


def find_teacher(model: str) -> TeacherFolder:
    """The teacher that `train.teacher.model` names: a folder, one that `sf model` has made, or RUN@VERSION.
    Raises ValueError, one sentence, if it is none of them or its weights cannot be loaded."""
    match = None if Path(model).exists() else _VERSION.fullmatch(model)
    if match is None:
        folder = policy_folder(model)
        check_weights_folder(folder, SETTING)
        return TeacherFolder(folder)
    if not (run := RunDirectory(match[1])).exists():
        raise ValueError(f"{SETTING}: {model} is not a version of a run: {run.uri} has no config.json")
    try:
        RunView(run).weights_of(int(match[2]))
    except ValueError as error:
        raise ValueError(f"{SETTING}: {error}") from None
    (teacher := version_of(run, int(match[2]))).check(SETTING, OF_A_RUN)
    return teacher


def version_of(run: RunDirectory, version: int) -> TeacherFolder:
    """A version of a run, whose weights must be there."""
    if has_weights(run.start_adapter_dir):
        return TeacherFolder(run.start_dir, adapter=run.version_dir(version))
    return TeacherFolder(run.start_dir, weights=run.weights_dir(version) if version else None)


def check_version(run: RunDirectory, version: int, remedy: str = OF_A_RUN) -> None:
    """Raises ValueError, one sentence that ends with the remedy, if a version of a run lacks some weights. If
    it lacks all of them, those who need them say so."""
    if has_weights(run.version_dir(version)) and exists(join(run.start_dir, "config.json")):
        version_of(run, version).check(f"run {run.run_id}", remedy)


def _name_of(uri: str) -> str:
    return uri.rsplit("/", 1)[-1]


def _is_weights(name: str) -> bool:
    return name != DELTA and any(fnmatch(name, pattern) for pattern in WEIGHT_FILES[:2])


def check_vocabulary(policy: Tokenizer, rows: int, folder: str, setting: str) -> None:
    """Raises ValueError, which names the setting and the first token that differs, if a token of the policy's
    has another id at the teacher, whose tokenizer and configuration are in the folder. `rows`: number of ids
    that the policy may sample, of which the teacher must know all."""
    own = policy.get_vocab()
    taught = read_tokenizer(folder, setting).get_vocab()
    for token, number in sorted(own.items(), key=lambda item: item[1]):
        if taught.get(token) != number:
            of_teacher = next(
                (repr(other) for other, token_id in taught.items() if token_id == number), "no token"
            )
            raise ValueError(
                f"{setting}: the vocabulary of {folder} differs from the policy's: id {number} is {token!r} "
                f"for the policy and {of_teacher} for the teacher; choose a teacher of the policy's "
                "family"
            )
    if (vocab_size := count_rows(folder)) is not None and vocab_size < rows:
        raise ValueError(
            f"{setting}: the vocabulary of {folder} has {vocab_size:,} ids, but the policy can "
            f"sample {rows:,}: choose a teacher whose vocabulary is at least as large"
        )


def count_rows(folder: str) -> int | None:
    """Number of ids that the model of this folder knows; None if its configuration is not there or does not
    say."""
    shape = read_model_config(folder, SETTING) if exists(join(folder, "config.json")) else {}
    return count_ids(shape)


def read_tokenizer(folder: str, setting: str) -> Tokenizer:
    """The tokenizer of a folder. Raises ValueError, which names the setting, if it cannot be read."""
    if not exists(file := join(folder, "tokenizer.json")):
        raise ValueError(
            f"{setting}: {folder} has no tokenizer.json, which is needed to compare it with the policy's "
            "vocabulary"
        )
    try:
        return load_tokenizer(file)
    except (ValueError, OSError) as error:
        raise ValueError(f"{setting}: {error}") from None
