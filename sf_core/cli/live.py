"""How a run tells its progress: live in a terminal, line by line elsewhere and in its log. Shows what the
data plane reports and what is committed, knows nothing of flows."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sf_core import waits
from sf_core.config import RunConfig
from sf_core.reports.view import iteration_windows, read_iterations
from sf_core.waits import clock
from storage.run_directory import RunDirectory

log = logging.getLogger(__name__)
# whatever the level of others is: it is what a log is looked into for
log.setLevel(logging.INFO)

STRAGGLER_S = 30.0
"""A session that runs longer is shown."""

LOOK_S = 3.0
"""So often held-out rewards are looked for: in an object store each look is a request."""


class RunProgress:
    """Two bars, iterations of the run and groups of the batch, and one line of figures."""

    def __init__(self, console: Console, iterations: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]:<28}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._num_iterations = iterations
        self._iterations = self._bars.add_task("iterations", total=iterations, note="starting")
        self._groups = self._bars.add_task("groups", total=None, note="")
        self._line = Text()

    def note(self, text: str) -> None:
        self._bars.update(self._iterations, note=text)

    def update(self, status: dict[str, Any], held_out: Mapping[int, float]) -> None:
        """Show what the data plane reports, and the held-out rewards by policy version."""
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
        if (straggler := status["straggler"]) and straggler["age_s"] > STRAGGLER_S:
            lines.append(f"oldest session {straggler['session']}: {straggler['age_s']:.0f} s")
        self._line = Text("\n".join("  " + line for line in lines), style="dim")

    def hear(self, line: str) -> None:
        """A line of the flow's log: what it tells is shown already."""

    def __rich__(self) -> RenderableType:
        return Group(self._bars, self._line)


class LineProgress:
    """The same where there is no terminal: a line for each thing that is done, or is awaited for long."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_served = False
        self._waits_since: float | None = None

    def note(self, text: str) -> None:
        self._console.print(f"{clock(time.time())}  {text}", highlight=False, soft_wrap=True)

    def update(self, status: dict[str, Any], held_out: Mapping[int, float]) -> None:
        self._is_served = True
        wait = status.get("wait")
        if wait and wait["since"] != self._waits_since:
            self.note(f"waiting since {clock(wait['since'])} for {wait['what']}")
            self._waits_since = wait["since"]

    def hear(self, line: str) -> None:
        """Pass on what a line of the flow's log tells of its progress, or of what it waits for. The data
        plane, once it serves the run, tells better what that is."""
        if (found := _LOGGED.match(line)) and (found["by"] == __name__ or not self._is_served):
            self.note(found["told"])


_LOGGED = re.compile(
    rf"\S+ \| \w+ +\| (?P<by>{re.escape(__name__)}|{re.escape(waits.__name__)}) - (?P<told>.*)"
)
"""As Prefect writes a line of ours."""


class NewLines:
    """The lines that a log gets from now on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = file.stat().st_size if file.exists() else 0

    def read(self) -> Iterator[str]:
        """Those that are complete and were not given yet."""
        if not self._file.exists():
            return
        if self._file.stat().st_size < self._at:
            # it was rotated
            self._at = 0
        with open(self._file, "rb") as file:
            file.seek(self._at)
            for line in file:
                if line.endswith(b"\n"):
                    self._at += len(line)
                    yield line.decode(errors="replace").rstrip("\n")


def tell(line: str) -> None:
    """Write it to the log of the flow, and of its run in Prefect."""
    log.info("%s", line)


def iteration_line(run: RunDirectory, number: int, iterations: int) -> str:
    """What one iteration that is through has come to."""
    # the iteration before tells when it began
    read = list(islice(read_iterations(run, max(0, number - 1)), 2 if number else 1))
    iteration, (start, end) = read[-1], iteration_windows(read)[number]
    figures = [f"reward {iteration.stages['rollout'].data['reward_mean']:.3f}"]
    if (evaluated := iteration.stages.get("evaluate")) is not None:
        figures.append(f"held-out {evaluated.data['reward_mean']:.3f} before it")
    seconds = end - start
    figures += [f"{iteration.sampled_tokens / seconds:,.0f} tokens/s", f"{seconds:.1f} s"]
    return f"iteration {number}, {number + 1} of {iterations}: {', '.join(figures)}"


class HeldOutRewards:
    """What a run's evaluations have come to, by policy version, read while it goes on."""

    def __init__(self, config: RunConfig) -> None:
        self._directory = RunDirectory(config.run_dir)
        self._every, self._last = config.evaluate.every, config.train.iterations
        self._found: dict[int, float] = {}
        self._next = 0
        self._looked_at = float("-inf")

    def look(self) -> Mapping[int, float]:
        """What is known. Reads manifests, and not more often than every `LOOK_S`."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            # a storage that fails for a moment or a broken manifest delays what is shown; the run has its own
            # patience, and its own sentence
            with suppress(OSError, ValueError):
                self._read()
            self._looked_at = time.monotonic()
        return self._found

    def _read(self) -> None:
        while self._next not in self._found:
            manifest = self._directory.read_manifest(self._next, "evaluate")
            if manifest is None:
                return
            self._found[self._next] = manifest.data["reward_mean"]
            self._next = min(self._next + self._every, self._last)


def _engine(engine: dict[str, Any]) -> str:
    version = engine["version"]
    return f"{engine['worker']}:{'starting' if version is None else f'v{version}'}"
