"""A data plane whose process is killed and started again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.dataplane.planes import ServedPlane, operator_client, running_process


@dataclass
class Restarts:
    """A data plane that can be killed and restarted, and the one engine and client that outlive it."""

    folder: Path
    model_dir: str
    port: int = 0
    """0: any free one, the same after a restart."""
    process: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    plane: ServedPlane = field(init=False)

    def start(self) -> None:
        options = ("--journal-dir", str(self.folder / "journal"))
        url = self.process.enter_context(running_process(self.folder / "port", self.port, *options))
        if not hasattr(self, "plane"):
            self.port = int(url.rsplit(":", 1)[1])
            self.plane = ServedPlane(url, operator_client(url), self.folder, self.model_dir)

    def kill(self) -> None:
        self.process.close()

    def restart(self) -> None:
        self.kill()
        self.start()

    @property
    def journal(self) -> Path:
        return self.folder / "run" / "journal" / "run.journal"
