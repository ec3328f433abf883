"""What can be deleted from a run directory: old checkpoints, old weights, remains of interrupted writes, the
journal of a finished run.

Owns what must stay: the weights that a resume publishes again, the checkpoint it continues from, the newest
policy, and everything newer, which a stage that is not committed yet may have written. Batches always stay:
with them every policy version can be rebuilt.
"""

from __future__ import annotations

from dataclasses import dataclass

from sf_core.config import RunConfig
from sf_core.reports.states import check_idle, is_finished, is_served
from sf_core.reports.view import RunView
from storage import files
from storage.checkpoints import has_checkpoint, remove_checkpoint
from storage.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Spare:
    """Something that can be deleted."""

    run: RunDirectory
    kind: str
    """checkpoints, weights, unfinished or journal."""
    uri: str
    bytes: int

    @property
    def name(self) -> str:
        return self.uri.removeprefix(self.run.uri + "/")

    def remove(self) -> None:
        if self.kind == "checkpoints":
            remove_checkpoint(self.uri)
        else:
            files.remove_folder(self.uri)


@dataclass(frozen=True, slots=True)
class Keep:
    checkpoints: int = 1
    """How many of the newest complete checkpoints stay."""
    weights: int = 1
    """How many of the newest published versions stay."""
    journals: bool = True


def check_not_linked(run: RunDirectory, where: str) -> None:
    """Raises ValueError if the folder holds only a link to the run, which others may still need."""
    if run.uri != files.absolute(where) and not files.lies_in(run.uri, where):
        raise ValueError(f"{run.uri}: is a link to a run elsewhere; to clean that up, name it")


def spares(run: RunDirectory, keep: Keep) -> list[Spare]:
    """What can be deleted, oldest first. Raises BusyError or ValueError like `check_idle`."""
    view = RunView(run)
    finished = is_finished(view, run.read_config(RunConfig).train.iterations)
    # no flow works on a finished run, even if its data plane cannot be asked
    if not finished:
        check_idle(run)
    found = _old_checkpoints(run, len(view.committed("train")), keep.checkpoints)
    found += _old_weights(run, len(view.committed("publish")), keep.weights)
    found += _unfinished(run, [uri for _, uri in found])
    # a data plane that still knows the run has the file open
    if not keep.journals and finished and is_served(run) == "no":
        found.append(("journal", run.journal_dir))
    # the target of a link may belong to another run
    own = [(kind, uri) for kind, uri in found if files.lies_in(uri, run.uri)]
    sizes = [Spare(run, kind, uri, files.folder_bytes(uri)) for kind, uri in own]
    return [spare for spare in sizes if spare.bytes]


def _old_checkpoints(run: RunDirectory, trained: int, keep: int) -> list[tuple[str, str]]:
    versions = _versions(run, "checkpoints")
    complete = [v for v in versions if v <= trained and has_checkpoint(run.checkpoint_dir(v))]
    oldest_kept = complete[-keep:][0] if complete else 0
    return [("checkpoints", run.checkpoint_dir(v)) for v in versions if v < oldest_kept]


def _old_weights(run: RunDirectory, published: int, keep: int) -> list[tuple[str, str]]:
    old = [version for version in _versions(run, "weights") if version <= published]
    return [("weights", run.weights_dir(v)) for v in old[:-keep]]


def _unfinished(run: RunDirectory, going: list[str]) -> list[tuple[str, str]]:
    """Partial files left by killed processes, where files are large."""
    uris = [uri for kind in ("checkpoints", "weights") for uri in files.list_unfinished(run.path(kind))]
    return [("unfinished", uri) for uri in uris if uri.rsplit("/", 1)[0] not in going]


def _versions(run: RunDirectory, kind: str) -> list[int]:
    names = (uri.rsplit("/", 1)[-1].removeprefix("v") for uri in files.list_folders(run.path(kind)))
    return sorted(int(name) for name in names if name.isdecimal())
