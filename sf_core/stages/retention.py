"""Retention: which files of a run directory may be deleted. They are old checkpoints, old weights, remains of
interrupted writes, uploads and measurements, unused images, and the journal of a finished run.

These stay: the weights that a resume publishes again, the checkpoint that it continues from, the newest
policy, and everything newer, because a stage that is not committed yet may have written it. Batches and a
teacher's scores of them always stay, because every policy version can be rebuilt from them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import get_args

from sf_core.config import RunConfig, TrainConfig
from sf_core.reports.states import check_idle, dataplane_state, is_finished
from sf_core.reports.view import RunView
from storage import files
from storage.media import media_file
from storage.run_directory import RunDirectory
from storage.tables.schema import IMAGES
from storage.tables.trajectories import TrajectoryKind, images_of, read_trajectories
from storage.tensors.checkpoints import has_checkpoint, remove_checkpoint
from storage.tensors.weights import remove_weights
from storage.unfinished import Upload, list_unfinished, list_uploads

SMALL_BYTES = 50_000_000
"""Versions of fewer bytes all stay, unless `train.keep_weights` says otherwise."""

KEPT_WEIGHTS = 2
"""How many of the newest larger versions stay."""

KEPT_EVERY = 10
"""Every version whose number is a multiple of this stays while a run goes on."""


@dataclass(frozen=True, slots=True)
class Removable:
    """A file or a folder that may be deleted."""

    run: RunDirectory
    kind: str
    """checkpoints, weights, unfinished, upload, measurement, picture or journal."""
    uri: str
    bytes: int
    upload: Upload | None = None

    @property
    def name(self) -> str:
        return self.uri.removeprefix(self.run.uri + "/")

    def remove(self) -> None:
        if self.upload is not None:
            return self.upload.abort()
        remove = {"checkpoints": remove_checkpoint, "weights": remove_weights}
        remove.get(self.kind, files.remove_folder)(self.uri)


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Limits of `sf gc`."""

    checkpoints: int = 1
    """How many of the newest complete checkpoints stay, beside those of `train.keep_every`."""
    weights: int = 1
    """How many of the newest published versions stay."""
    journals: bool = True
    """Whether the journals of finished runs stay."""


def check_not_linked(run: RunDirectory, where: str) -> None:
    """Raises ValueError if the folder holds only a link to the run, which others may still need."""
    if run.uri != files.absolute(where) and not files.lies_in(run.uri, where):
        raise ValueError(f"{run.uri} is a link to a run in another folder: name the path of that run itself")


def find_removable(run: RunDirectory, limits: RetentionLimits) -> list[Removable]:
    """Everything that may be deleted, oldest first. Raises BusyError or ValueError like `check_idle`."""
    view = RunView(run)
    config = run.read_config(RunConfig).train
    finished = is_finished(view, config.iterations)
    # no flow works on a finished run, even if its data plane cannot be asked
    if not finished:
        check_idle(run)
    trained = len(view.read_committed("train"))
    found = _find_old_checkpoints(run, trained, limits.checkpoints, config.keep_every)
    needed = _find_kl_references(run, {uri for _, uri in found}, trained, config)
    found += [
        ("weights", run.weights_dir(version))
        for version in _find_old_versions(run, len(view.read_committed("publish")), limits.weights)
        if version not in needed
    ]
    found += _find_unfinished(run, [uri for _, uri in found])
    found += [("measurement", measured.uri) for measured in _find_interrupted(run)]
    found += [("picture", uri) for uri in _find_unused_images(run, finished)]
    # a data plane that still knows the run has the file open
    if not limits.journals and finished and dataplane_state(run) == "absent":
        found.append(("journal", run.journal_dir))
    uploads = [Removable(run, "upload", upload.uri, upload.bytes, upload) for upload in list_uploads(run.uri)]
    return [*_removables(run, found), *uploads]


def find_removable_checkpoints(run: RunDirectory, trained: int, config: TrainConfig) -> list[Removable]:
    """Checkpoints that a run of these settings does not keep once this version is committed. Only for the
    flow that works on the run."""
    return _removables(run, _find_old_checkpoints(run, trained, config.keep_checkpoints, config.keep_every))


def num_kept_weights(train: TrainConfig, version_bytes: int) -> int | None:
    """How many of the newest versions of this size stay; None: all."""
    return train.keep_weights or (None if version_bytes < SMALL_BYTES else KEPT_WEIGHTS)


def find_removable_weights(
    run: RunDirectory, published: int, config: RunConfig, in_use: Collection[int] = ()
) -> list[Removable]:
    """Versions that a run of these settings does not keep while the version after this one is published.
    `in_use` are the versions that engines have or load. Only for the flow that works on the run."""
    keep = num_kept_weights(config.train, files.folder_bytes(run.weights_dir(published)))
    if keep is None:
        return []
    old = _find_old_versions(run, published, keep)
    if not old:
        return []
    needed = _find_kl_references(run, set(), published, config.train) | _find_measured(run) | {*in_use}
    removable = []
    for version in old:
        stays = version % KEPT_EVERY == 0 or version % config.evaluate.every == 0
        # settings of an earlier attempt may have had others evaluated
        if version not in needed and not stays and run.read_manifest(version, "evaluate") is None:
            removable.append(("weights", run.weights_dir(version)))
    return _removables(run, removable)


def _find_measured(run: RunDirectory) -> set[int]:
    """Versions that were measured apart from the run."""
    names = [uri.rsplit("/", 1)[-1] for uri in files.list_folders(run.measured_dir)]
    matches = [re.match(r"v(\d+)-", name) for name in names]
    return {int(match[1]) for match in matches if match is not None}


def _removables(run: RunDirectory, found: list[tuple[str, str]]) -> list[Removable]:
    removables = []
    for kind, uri in found:
        # the target of a link may belong to another run
        num_bytes = files.folder_bytes(uri) if files.lies_in(uri, run.uri) else 0
        if num_bytes:
            removables.append(Removable(run, kind, uri, num_bytes))
    return removables


def _find_old_checkpoints(
    run: RunDirectory, trained: int, keep: int, keep_every: int | None
) -> list[tuple[str, str]]:
    versions = run.list_versions("checkpoints")
    complete = [
        version for version in versions if version <= trained and has_checkpoint(run.checkpoint_dir(version))
    ]
    oldest_retained = complete[-keep:][0] if complete else 0
    for_good = {version for version in complete if keep_every and version % keep_every == 0}
    old = [version for version in versions if version < oldest_retained and version not in for_good]
    return [("checkpoints", run.checkpoint_dir(version)) for version in old]


def _find_old_versions(run: RunDirectory, published: int, keep: int) -> list[int]:
    """Stored versions before the newest `keep` published ones."""
    return [version for version in run.list_versions("weights") if version <= published][:-keep]


def _find_kl_references(run: RunDirectory, removed: set[str], trained: int, config: TrainConfig) -> set[int]:
    """Versions that the KL terms of later steps refer to, steps that may be repeated included."""
    if (kl := config.loss.kl) is None:
        return set()
    checkpoints = run.list_versions("checkpoints")
    first = min((v for v in checkpoints if run.checkpoint_dir(v) not in removed), default=0)
    return {kl.version(step) for step in range(first, trained + 1)}


def _find_unfinished(run: RunDirectory, removed: list[str]) -> list[tuple[str, str]]:
    """Partial files left by killed processes, except in folders that are removed as a whole."""
    uris = [uri for uri in list_unfinished(run.uri) if uri.rsplit("/", 1)[0] not in removed]
    return [("unfinished", uri) for uri in uris]


def _find_unused_images(run: RunDirectory, finished: bool) -> list[str]:
    """Images that no trajectory has. None if the run goes on or a data plane knows the run, because sessions
    that are not written yet may have them."""
    images = files.list_files(run.media_dir)
    if not images or not finished or dataplane_state(run) != "absent":
        return []
    kinds: tuple[TrajectoryKind, ...] = get_args(TrajectoryKind)
    parts = [uri for kind in kinds for uris in run.list_partitions(kind).values() for uri in uris]
    tables = (read_trajectories(uri, ["session_id", IMAGES.name]) for uri in parts)
    spans = (span for table in tables for row in images_of(table) for span in row)
    used = {media_file(run.media_dir, span.sha256) for span in spans}
    return [uri for uri in images if uri not in used]


def _find_interrupted(run: RunDirectory) -> list[RunDirectory]:
    """Measurements of `sf evaluate` that have no result and that no flow works on. Each has a copy of the
    weights."""
    measured = [RunDirectory(uri) for uri in files.list_folders(run.measured_dir)]
    without_result = [run for run in measured if run.read_manifest(0, "evaluate") is None]
    return [run for run in without_result if dataplane_state(run) != "running"]
