"""Coordination of the ranks of one attempt at a train stage, with each other and with the flow, through
files.

Owns a folder of small files in the run directory per attempt. An attempt is over for good once the flow has
ended it or a later attempt of the flow has begun: from then on its ranks must not write anything.
"""

from __future__ import annotations

import json

from storage import files
from storage.json_files import load_json
from storage.run_directory import RunDirectory


class GangFiles:
    """The files of one attempt at a train step, named by the iteration, the attempt of the flow and the
    number of this one, from 0."""

    def __init__(self, directory: RunDirectory, iteration: int, attempt: int, step_attempt: int) -> None:
        self._directory = directory
        self._iteration = iteration
        self._attempt = attempt
        self._folder = directory.gang_dir(iteration, attempt, step_attempt)

    @property
    def label(self) -> str:
        return f"train of iteration {self._iteration}"

    def begin_rank(self, rank: int, *, once: bool) -> bool:
        """Record that this rank has begun. With `once`, returns False if it had begun before."""
        try:
            files.write_atomic(self._file(f"rank-{rank}"), b"", create=once)
        except FileExistsError:
            return False
        return True

    def has_begun(self, rank: int) -> bool:
        return files.exists(self._file(f"rank-{rank}"))

    def note_computed(self, rank: int) -> None:
        files.write_atomic(self._file(f"computed-{rank}"), b"")

    def has_computed(self, rank: int) -> bool:
        return files.exists(self._file(f"computed-{rank}"))

    def announce(self, host: str, port: int) -> None:
        """Publish the address at which rank 0 waits for the other ranks."""
        text = json.dumps({"host": host, "port": port})
        files.write_atomic(self._file("address.json"), text.encode())

    def address(self) -> tuple[str, int] | None:
        if (text := files.read_if_there(self._file("address.json"))) is None:
            return None
        address = load_json(text)
        return address["host"], address["port"]

    def end(self) -> None:
        files.write_atomic(self._file("over"), b"")

    def is_over(self) -> bool:
        ended = files.exists(self._file("over"))
        return ended or self._directory.is_superseded(self._attempt)

    def is_committed(self) -> bool:
        """Whether any attempt has committed the train stage."""
        return self._directory.read_manifest(self._iteration, "train") is not None

    def _file(self, name: str) -> str:
        return files.join(self._folder, name)
