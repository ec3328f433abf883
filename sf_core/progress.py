"""The live display of a run in the terminal: reads the data plane's status, knows nothing of flows."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


class RunProgress:
    """Two bars, iterations of the run and groups of the batch, and one line of figures."""

    def __init__(self, console: Console, iterations: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._iterations = self._bars.add_task("iterations", total=iterations, note="starting")
        self._groups = self._bars.add_task("groups", total=None, note="")
        self._line = Text()

    def note(self, text: str) -> None:
        self._bars.update(self._iterations, note=text)

    def update(self, status: dict[str, Any]) -> None:
        """Show what the data plane reports."""
        stage = status.get("stage") or "starting"
        self._bars.update(self._iterations, completed=status["iteration"], note=stage)
        self._bars.update(
            self._groups, completed=min(status["accepted"], status["needed"]), total=status["needed"]
        )
        figures = [
            f"{status['tokens_per_second']:,.0f} tokens/s",
            f"reward {_number(status['reward_recent'])}",
            f"held-out {_held_out(status['evaluations'])}",
            f"{status['sessions_running']} sessions",
            " ".join(f"{e['worker']}:v{e['version']}" for e in status["engines"]) or "no engine",
        ]
        self._line = Text("  " + " · ".join(figures), style="dim")

    def __rich__(self) -> RenderableType:
        return Group(self._bars, self._line)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _held_out(evaluations: dict[str, Any]) -> str:
    points = [(int(version), mean) for version, mean in evaluations.items() if mean is not None]
    return " → ".join(f"{mean:.2f}" for _, mean in sorted(points)) or "-"
