"""The live display of a run in the terminal: shows the data plane's status and the held-out rewards, knows
nothing of flows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sf_core.config import RunConfig
from sf_core.waits import clock
from storage.run_directory import RunDirectory

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

    def __rich__(self) -> RenderableType:
        return Group(self._bars, self._line)


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
