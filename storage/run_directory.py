"""The layout of a run directory, and its manifests, which alone decide which stages are done. Also the record
that each attempt of a flow leaves there.

Owns every path and the order of stages. Knows nothing of what the stages compute.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from storage import files
from storage.files import FileRef
from storage.json_files import parse_json
from storage.manifests import Manifest, parse_manifest
from storage.tensors.weights import has_weights


class Attempt(BaseModel):
    """One flow attempt on a run."""

    model_config = ConfigDict(frozen=True)

    dataplane: str | None = None
    """URL of the data plane that serves the attempt; empty once that data plane is gone for good."""
    host: str | None = None
    """Machine on which the attempt began; on another one, a loopback URL means another data plane."""
    evaluate_only: bool = False
    """The attempt measures a policy version and trains nothing."""


STAGES = ("rollout", "filter", "train", "publish")

Model = TypeVar("Model", bound=BaseModel)


class RunDirectory:
    """A run's folder on any fsspec filesystem; its last path component is the run id."""

    def __init__(self, uri: str) -> None:
        self.uri = files.absolute(uri)
        self.run_id = self.uri.rstrip("/").rsplit("/", 1)[-1]

    def path(self, *parts: str) -> str:
        """URI of a path in the run directory, such as the `uri` of a manifest's FileRef."""
        return files.join(self.uri, *parts)

    @property
    def is_local(self) -> bool:
        return files.is_local(self.uri)

    @property
    def local_dir(self) -> str:
        """Folder on this machine for logs, the lock and other files of a command that works on the run: the
        run directory itself, or a folder in ./runs that belongs to this URL alone."""
        if self.is_local:
            return self.uri
        # no run id contains @, so that no local run has this name
        digest = hashlib.sha256(self.uri.encode()).hexdigest()[:8]
        return files.absolute(f"runs/{self.run_id}@{digest}")

    @property
    def start_dir(self) -> str:
        """Hugging Face folder that the run starts from: tokenizer, configuration, weights of version 0."""
        return self.path("start")

    @property
    def start_adapter_dir(self) -> str:
        """Folder of the adapter that the run starts from, if it trains one."""
        return self.path("start", "adapter")

    @property
    def warmstart_dir(self) -> str:
        """Run directory of the supervised start of a model, whose last version is this run's version 0."""
        return self.path("warmstart")

    @property
    def policy_dir(self) -> str:
        """Hugging Face folder of the trained policy."""
        return self.path("policy")

    @property
    def policy_adapter_dir(self) -> str:
        """Folder of the trained adapter, if the run trains one."""
        return self.path("policy", "adapter")

    @property
    def measured_dir(self) -> str:
        """Folder with a run directory for each version that was measured apart. A run that has it in the
        folder of its evaluations, where some readers would take it for their rows, keeps it there."""
        older = self.path("evaluations", "_measured")
        return older if files.exists(older) else self.path("measured")

    @property
    def journal_dir(self) -> str:
        return self.path("journal")

    @property
    def media_dir(self) -> str:
        """Folder of the images that policies were shown (storage/media.py)."""
        return self.path("media")

    def weights_dir(self, version: int) -> str:
        return self.path("weights", f"v{version:05d}")

    def version_dir(self, version: int) -> str:
        """Folder of the weights of a version; those of version 0 are in the start folder. If a run trains an
        adapter, it is the adapter's."""
        if version:
            return self.weights_dir(version)
        return self.start_adapter_dir if has_weights(self.start_adapter_dir) else self.start_dir

    def checkpoint_dir(self, version: int) -> str:
        return self.path("checkpoints", f"{version:05d}")

    def greedy_file(self, version: int) -> str:
        """Greedy answers of a version to a few held-out tasks."""
        return self.path("greedy", f"v{version:05d}.json")

    def list_versions(self, kind: Literal["weights", "checkpoints"]) -> list[int]:
        """Versions with a folder of this kind, in order; what it holds may be incomplete."""
        names = (uri.rsplit("/", 1)[-1].removeprefix("v") for uri in files.list_folders(self.path(kind)))
        return sorted(int(name) for name in names if name.isdecimal())

    def gang_dir(self, iteration: int, attempt: int, epoch: int) -> str:
        return self.path("gangs", f"{iteration:05d}", f"{attempt}.{epoch}")

    def partition(self, kind: str, iteration: int) -> str:
        """Folder of the Parquet files of one iteration, or of one policy version for evaluations."""
        return self.path(kind, f"iteration={iteration}")

    def list_partitions(self, kind: str) -> dict[int, list[str]]:
        """Parquet files by iteration or policy version, in order, for a kind that no manifest names."""
        folders: dict[int, str] = {}
        for folder in files.list_folders(self.path(kind)):
            match = re.search(r"/iteration=(\d+)$", folder)
            if match is not None:
                folders[int(match[1])] = folder
        partitions: dict[int, list[str]] = {}
        for number in sorted(folders):
            uris = files.list_files(folders[number])
            # a folder exists before its first file does
            if uris:
                partitions[number] = uris
        return partitions

    def metrics_file(self, kind: str, iteration: int) -> str:
        return self.path("metrics", kind, f"iteration={iteration}.parquet")

    def events_file(self, kind: str, iteration: int) -> str:
        """Event file of TensorBoard, which recognises its files by `tfevents` in the name."""
        return self.path("tensorboard", kind, f"events.out.tfevents.{iteration:010d}")

    def manifest_file(self, iteration: int | None, stage: str) -> str:
        parts = [f"{iteration:05d}"] if iteration is not None else []
        return self.path("manifests", *parts, f"{stage}.json")

    def relative(self, ref: FileRef) -> FileRef:
        """The reference as manifests keep it: relative, so that the run directory can be moved."""
        return replace(ref, uri=ref.uri.removeprefix(self.uri + "/"))

    def exists(self) -> bool:
        """Whether there is a run here: its configuration is stored."""
        return files.exists(self.path("config.json"))

    def write_config(self, config: BaseModel) -> FileRef:
        return files.write_atomic(self.path("config.json"), config.model_dump_json(indent=2).encode())

    def read_config(self, model: type[Model]) -> Model:
        """Raises ValueError with one sentence if there is no run here or its configuration is invalid."""
        uri = self.path("config.json")
        if (text := files.read_if_there(uri)) is None:
            raise ValueError(f"{self.uri}: no run here (config.json is missing)")
        return parse_json(model, text, f"{uri}: cannot be read")

    def write_summary(self, summary: dict[str, object]) -> FileRef:
        return files.write_atomic(self.path("summary.json"), json.dumps(summary, indent=2).encode())

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, None if not written yet. Raises ValueError with one sentence if the file is broken."""
        uri = self.path("summary.json")
        text = files.read_if_there(uri)
        return None if text is None else parse_json(dict[str, Any], text, f"{uri}: cannot be read")

    def write_timeline(self, name: str, until: float, data: bytes) -> FileRef:
        """Write the part of the timeline of `name` that ends at `until` (Unix seconds), once and for all."""
        uri = self.path("timeline", _hour(until), f"{name}.{round(until * 1e6)}.json")
        return files.write_atomic(uri, data)

    def read_timelines(self, since: float = 0.0) -> dict[str, bytes]:
        """The parts of timelines that end at or after `since` (Unix seconds), by URI."""
        # by hours: a long run with many devices has too many parts to list all of them each time
        folder = self.path("timeline")
        hours = [hour for hour in files.list_folders(folder) if hour.rpartition("/")[2] >= _hour(since)]
        parts: dict[str, bytes] = {}
        for uri in itertools.chain.from_iterable(map(files.list_files, [folder, *hours])):
            match = re.search(r"\.(\d+)\.json$", uri)
            if match is not None and int(match[1]) >= since * 1e6:
                parts[uri] = files.read_bytes(uri)
        return parts

    @property
    def trace_file(self) -> str:
        return self.path("timeline.json")

    @property
    def timeline_picture(self) -> str:
        return self.path("timeline.png")

    def read_manifest(self, iteration: int | None, stage: str) -> Manifest | None:
        """The manifest, None if not committed. Raises ValueError if it is broken or of another stage."""
        uri = self.manifest_file(iteration, stage)
        text = files.read_if_there(uri)
        return None if text is None else parse_manifest(uri, text, self.run_id, iteration, stage)

    def read_committed(self, iteration: int, stage: str) -> Manifest:
        """The manifest of a stage that must be committed by now."""
        manifest = self.read_manifest(iteration, stage)
        assert manifest is not None, f"{stage} of iteration {iteration} must be committed first"
        return manifest

    def commit_manifest(self, manifest: Manifest) -> Manifest:
        """Write the manifest atomically, after all outputs; returns the one that is in force.

        Committing equal outputs again keeps the first manifest. Raises ValueError if the stage was committed
        with other outputs, or if a later attempt has begun.
        """
        outputs = [self.relative(ref) for ref in manifest.outputs]
        manifest = manifest.model_copy(update={"outputs": outputs})
        uri = self.manifest_file(manifest.iteration, manifest.stage)
        text = manifest.model_dump_json(indent=2).encode()
        # refuse what could never be read back: a manifest of another run, or values that JSON cannot hold
        parse_manifest(uri, text, self.run_id, manifest.iteration, manifest.stage)
        if (committed := self._find_committed(manifest)) is not None:
            return committed
        self.refuse_superseded(manifest.attempt, f"commit {manifest.label}")
        try:
            files.write_atomic(uri, text, create=True)
        except FileExistsError:  # another attempt has just written it
            committed = self._find_committed(manifest)
            assert committed is not None
            return committed
        self._remove_strays(manifest)
        return manifest

    def verify_sizes(self, manifest: Manifest) -> None:
        """Raises ValueError if an output is missing or has another size; reads none of them."""
        for ref in manifest.outputs:
            self._refuse_size(manifest, ref)

    def verify(self, manifest: Manifest) -> None:
        """Raises ValueError if an output is missing or differs from what the stage wrote."""
        for ref in manifest.outputs:
            self._refuse_size(manifest, ref)
            if files.describe(self.path(ref.uri)).sha256 != ref.sha256:
                raise ValueError(
                    f"{self.path(ref.uri)}: the content differs from what {manifest.label} wrote"
                )

    def _refuse_size(self, manifest: Manifest, ref: FileRef) -> None:
        uri = self.path(ref.uri)
        try:
            num_bytes = files.size(uri)
        except FileNotFoundError:
            raise ValueError(f"{uri}: the file is missing, but {manifest.label} is committed") from None
        if num_bytes != ref.bytes:
            raise ValueError(f"{uri}: the file has {num_bytes} bytes, but {manifest.label} wrote {ref.bytes}")

    def discard_start(self) -> None:
        """Undo the start stage. Only for a start folder from which no work can have begun."""
        files.remove(self.manifest_file(None, "start"))
        files.remove_folder(self.start_dir)

    def begin_anew(self) -> None:
        """Remove what attempts have made, but for logs and the sessions that agents opened. Only for a run
        without a batch, in an attempt that has begun."""
        # manifests first, because they name files in the others
        rows = ("evaluations", "trajectories", "outcomes", "judgements", "evaluation_judgements", "scores")
        for part in ("manifests", "start", "warmstart", *rows, "measured", "metrics", "tensorboard"):
            files.remove_folder(self.path(part))

    def begin_attempt(self, attempt: Attempt | None = None) -> int:
        """Begin an attempt and return its number, from 1; earlier attempts cannot commit any more."""
        text = (attempt or Attempt()).model_dump_json().encode()
        number = 1
        while True:
            # not every object store refuses to overwrite a file: looking first makes that unlikely
            if not files.exists(self._attempt_file(number)):
                with suppress(FileExistsError):
                    files.write_atomic(self._attempt_file(number), text, create=True)
                    return number
            number += 1

    def end_attempt(self, dataplane: str, host: str) -> None:
        """If the newest attempt names the data plane at this URL on this machine, record that it is gone for
        good, so that nothing waits for it. Raises ValueError if the attempt's file is broken."""
        attempt = self.newest_attempt()
        if (attempt.dataplane, attempt.host) == (dataplane, host):
            ended = attempt.model_copy(update={"dataplane": ""})
            files.write_atomic(self.newest_attempt_file(), ended.model_dump_json().encode())

    def is_superseded(self, attempt: int) -> bool:
        """Whether a later attempt has begun."""
        return files.exists(self._attempt_file(attempt + 1))

    def refuse_superseded(self, attempt: int, deed: str) -> None:
        """Raises ValueError that names the refused deed if a later attempt has begun."""
        if self.is_superseded(attempt):
            raise ValueError(
                f"{self.run_id}: attempt {attempt} was superseded by a later attempt and must not {deed}"
            )

    def newest_attempt(self) -> Attempt:
        """The newest attempt, empty if none has begun. Raises ValueError if its file is broken."""
        uri = self.newest_attempt_file()
        text = files.read_if_there(uri)
        return Attempt() if text is None else parse_json(Attempt, text, f"{uri}: attempt cannot be read")

    def newest_attempt_file(self) -> str:
        """File of the newest attempt; of the first one if none has begun."""
        uris = files.list_files(self.path("attempts"))
        names = [uri.rsplit("/", 1)[-1] for uri in uris]
        numbers = [int(name) for name in names if name.isdecimal()]
        return self._attempt_file(max(numbers, default=1))

    def _attempt_file(self, attempt: int) -> str:
        return self.path("attempts", f"{attempt:05d}")

    def _find_committed(self, manifest: Manifest) -> Manifest | None:
        existing = self.read_manifest(manifest.iteration, manifest.stage)
        if existing is not None and not existing.has_outputs_of(manifest):
            raise ValueError(
                f"{self.run_id}: {manifest.label} was committed by attempt {existing.attempt} with other "
                f"outputs; attempt {manifest.attempt} must not replace them"
            )
        return existing

    def _remove_strays(self, manifest: Manifest) -> None:
        """Remove Parquet parts of attempts that died before they committed: readers of the folder that ignore
        the manifest would count their rows twice."""
        named = {self.path(ref.uri) for ref in manifest.outputs}
        folders = {uri.rsplit("/", 1)[0] for uri in named}
        partitions = sorted(folder for folder in folders if "/iteration=" in folder)
        for uri in itertools.chain.from_iterable(map(files.list_files, partitions)):
            if uri not in named:
                files.remove(uri)


def _hour(moment: float) -> str:
    """Name of the UTC hour of Unix seconds; names sort by time."""
    return time.strftime("%Y-%m-%dT%H", time.gmtime(moment))
