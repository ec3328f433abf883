"""Shows the progress of a run: live in a terminal, line by line elsewhere and in its log. Reads the status of
the data plane and committed manifests; knows nothing of flows."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sf_core import waits
from sf_core.config import RunConfig
from sf_core.config.rollout_config import REASONS, failures_text
from sf_core.dataplane.api_schemas import EngineStatus, RunStatus
from sf_core.process.user_code import printable
from sf_core.reports import log_lines
from sf_core.reports.view import RunView
from sf_core.waits import clock
from storage.files import open_read
from storage.run_directory import RunDirectory

STRAGGLER_S = 30.0
"""Age from which the oldest session is shown."""

LOOK_S = 3.0
"""Interval of reads of held-out rewards: in an object store each read is a request."""


class RunProgress:
    """Live display: bars for iterations of the run and groups of the batch, and a line of figures."""

    def __init__(self, console: Console, iterations: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<11}", markup=False),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]:<28}", markup=False),
            TimeElapsedColumn(),
            console=console,
        )
        self._num_iterations = iterations
        self._iterations = self._bars.add_task("iterations", total=iterations, note="starting")
        self._groups = self._bars.add_task("groups", total=None, note="")
        self._line = Text()

    def show_status(self, text: str) -> None:
        self._bars.update(self._iterations, note=text)

    def update(self, status: RunStatus, held_out: Mapping[int, float]) -> None:
        """Show the status of the run in the data plane, and the held-out rewards by policy version."""
        note = f"{status['stage']} {status['iteration']}" if "stage" in status else "starting"
        self._bars.update(self._iterations, completed=status["next_batch"], note=note)
        needed = status["groups_needed"]
        all_sealed = status["next_batch"] >= self._num_iterations
        accepted = needed if all_sealed else min(status["groups_accepted"], needed)
        in_flight = f"{status['groups_in_flight']} in flight"
        self._bars.update(
            self._groups, completed=accepted, total=needed, note="" if all_sealed else in_flight
        )
        reward = status["reward_recent"]
        figures = [
            f"{status['tokens_per_second']:,.0f} tokens/s",
            "reward " + ("-" if reward is None else f"{reward:.2f}"),
            "held-out " + (" → ".join(f"{held_out[version]:.2f}" for version in sorted(held_out)) or "-"),
            f"{status['sessions_running']} sessions",
            " ".join(map(_engine, status["engines"])) or "no engine",
        ]
        lines = [" · ".join(figures)]
        if wait := status.get("wait"):
            lines.append(f"waiting since {clock(wait['since'])} for {wait['what']}")
        if failed := status["counters"].get("failed_sessions"):
            lines.append(f"{failed} sessions failed: {_reasons(status)}; last error: {status['last_error']}")
        if (straggler := status["straggler"]) and straggler["age_s"] > STRAGGLER_S:
            lines.append(f"oldest session {straggler['session']}: {straggler['age_s']:.0f} s")
        self._line = Text(printable("\n".join("  " + line for line in lines)), style="dim")

    def hear(self, line: str) -> None:
        """Ignore a line of the flow's log, whose content is shown already."""

    def __rich__(self) -> RenderableType:
        return Group(self._bars, self._line)


class LineProgress:
    """Display without a terminal: a line for each completed step and each long wait."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_served = False
        self._waits_since: float | None = None

    def show_status(self, text: str) -> None:
        self._console.print(f"{clock(time.time())}  {text}", soft_wrap=True)

    def update(self, status: RunStatus, held_out: Mapping[int, float]) -> None:
        self._is_served = True
        wait = status.get("wait")
        if wait and wait["since"] != self._waits_since:
            self.show_status(f"waiting since {clock(wait['since'])} for {wait['what']}")
            self._waits_since = wait["since"]

    def hear(self, line: str) -> None:
        """Print the progress or the wait in a line of the flow's log. Once the data plane serves the run, its
        status replaces the flow's lines about waits."""
        if (logged := _LOGGED.match(line)) and (logged["by"] == log_lines.__name__ or not self._is_served):
            self.show_status(logged["told"])


_LOGGED = re.compile(
    rf"\S+ \| \w+ +\| (?P<by>{re.escape(log_lines.__name__)}|{re.escape(waits.__name__)}) - (?P<told>.*)"
)
"""Matches a line of reports/log_lines.py or waits.py in Prefect's format."""


class NewLines:
    """Reads the lines appended to a log from now on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = file.stat().st_size if file.exists() else 0

    def read(self) -> Iterator[str]:
        """Complete lines that were not returned yet."""
        if not self._file.exists():
            return
        if self._file.stat().st_size < self._at:
            # the log was rotated
            self._at = 0
        with open_read(str(self._file)) as file:
            file.seek(self._at)
            for line in file:
                if line.endswith(b"\n"):
                    self._at += len(line)
                    yield line.decode(errors="replace").rstrip("\n")


class HeldOutRewards:
    """Held-out rewards of a running run, by policy version."""

    def __init__(self, config: RunConfig) -> None:
        self._run = RunDirectory(config.run_dir)
        self._due = [*range(0, config.train.iterations, config.evaluate.every), config.train.iterations]
        """The versions to evaluate, in order."""
        self._rewards: dict[int, float] = {}
        self._looked_at = float("-inf")

    def refresh(self) -> Mapping[int, float]:
        """The rewards known so far. Reads manifests, at most once every `LOOK_S`."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            # a storage failure or a broken manifest only delays the display; the run itself reports it
            with suppress(OSError, ValueError):
                view = RunView(self._run)
                while rewards := view.read_held_out(self._due[len(self._rewards) :][:1]):
                    self._rewards |= rewards
            self._looked_at = time.monotonic()
        return self._rewards


def _reasons(status: RunStatus) -> str:
    """Failures by reason since the data plane began to serve the run."""
    return failures_text(
        {reason: n for reason in REASONS if (n := status["counters"].get(f"failures.{reason}"))}
    )


def _engine(engine: EngineStatus) -> str:
    version = engine["version"]
    return f"{engine['worker']}:{'starting' if version is None else f'v{version}'}"
