"""A wall clock for a test's processes that can jump while they run: clock.c, preloaded into each of them."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    def __init__(self, folder: Path) -> None:
        """Raises RuntimeError if there is no C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            raise RuntimeError("a clock that can jump needs a C compiler (cc)")
        self._library = folder / "clock.so"
        self._file = folder / "clock"
        self._hours = 0.0
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(self._library), str(SOURCE)]
        subprocess.run(command, check=True)
        self._write()

    @property
    def env(self) -> dict[str, str]:
        """Environment that gives a process and its children this clock."""
        return {"LD_PRELOAD": str(self._library), "SF_CLOCK": str(self._file)}

    def jump(self, hours: float) -> None:
        self._hours += hours
        self._write()

    def _write(self) -> None:
        # in place: the processes have mapped the file
        with open(self._file, "r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("d", self._hours * 3600))
