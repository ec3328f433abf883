"""The list of runs that a data plane serves, for the process that replaces it."""

from __future__ import annotations

import json
from pathlib import Path

from storage.files import read_if_there, write_atomic
from storage.json_files import load_json
from storage.locks import FileLock, HeldError


class OpenRuns:
    """Paths of the journals of the runs that a restart must reopen without a request, in one small file. A
    lock lets only one process at a time use the folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if another data plane works in this folder."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = FileLock(folder / "lock")
        except HeldError:
            raise ValueError(
                f"another data plane uses {folder}: give this data plane its own folder"
            ) from None
        self._file = folder / "open-runs.json"
        self._journals: dict[str, str] = load_json(read_if_there(str(self._file)) or b"{}")

    @property
    def journals(self) -> list[Path]:
        # a run directory may have been removed since
        return [path for path in map(Path, self._journals.values()) if path.exists()]

    def add(self, run_id: str, journal: Path) -> None:
        self._write(self._journals | {run_id: str(journal.absolute())})

    def remove(self, run_id: str) -> None:
        self._write({name: journal for name, journal in self._journals.items() if name != run_id})

    def close(self) -> None:
        self._lock.close()

    def _write(self, journals: dict[str, str]) -> None:
        if journals == self._journals:
            return
        write_atomic(str(self._file), json.dumps(journals).encode())
        self._journals = journals
