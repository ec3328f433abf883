"""`sf evaluate` with another version, other tasks or other settings: versions are measured apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from rich.console import Group, RenderableType
from rich.text import Text

from sf_core.config import RunConfig
from sf_core.environments.prompts import Prompts
from sf_core.reports.evaluations.comparison import (
    Comparison,
    Measured,
    compare,
    write_comparison,
)
from sf_core.reports.tables import answers_table
from sf_core.stages.evaluate import open_measurement
from storage.run_directory import RunDirectory

_IN_PLACE = ("evaluate.num_tasks=", "cluster.", "dataplane.")
"""Settings with which the newest version is measured in the run itself."""


@dataclass(frozen=True, slots=True)
class MeasuredResult:
    comparison: Comparison
    file: str

    def as_json(self) -> str:
        # in ASCII: an answer holds characters that steer a terminal
        return json.dumps(orjson.loads(orjson.dumps(asdict(self.comparison), option=orjson.OPT_NON_STR_KEYS)))

    def as_table(self) -> RenderableType:
        own = self.comparison
        lines = [f"{own.tasks} tasks of {own.environment}, {own.answers} answers each"]
        lines += [_describe(own.before)] if own.before else []
        lines.append(_describe(own.after))
        if own.difference is not None and own.interval is not None:
            low, high = own.interval
            lines.append(
                f"difference {own.difference:+.3f} (95 %: {low:+.3f} to {high:+.3f}); of {own.tasks} tasks "
                f"{own.won} won, {own.lost} lost"
            )
        before = "" if own.before is None else f"version {own.before.version}"
        table = answers_table(own.examples, before, f"version {own.after.version}")
        return Group(Text("\n".join(lines)), table, Text(f"kept in {self.file}"))


def _describe(version: Measured) -> str:
    low, high = version.interval
    solved = ", ".join(f"pass@{k} {share:.3f}" for k, share in version.solved.items())
    return f"version {version.version}: reward {version.reward:.3f} (95 %: {low:.3f} to {high:.3f}), {solved}"


def is_plain(version: int | None, against: int | None, prompts: Path | None, changes: Sequence[str]) -> bool:
    """Whether the newest version is measured as the run itself does."""
    is_as_configured = all(change.startswith(_IN_PLACE) for change in changes)
    return version is None and against is None and prompts is None and is_as_configured


def evaluate_apart(
    run: str,
    version: int | None,
    against: int | None,
    prompts: Path | None,
    changes: list[str],
    measure: Callable[[RunConfig], None],
) -> MeasuredResult:
    """Measure a version, and the one to compare it with, unless that was done before with these settings.
    Raises ValueError with one sentence if one cannot be measured."""
    if prompts is not None:
        changes = [*_name_prompts(prompts.resolve()), *changes]
    versions = [version] if against is None else [version, against]
    measurements = [open_measurement(run, measurement, changes) for measurement in versions]
    for measurement in measurements:
        if not measurement.is_done:
            measurement.begin()
            measure(measurement.config)
        measurement.end()
    uris = [measurement.directory.uri for measurement in measurements]
    comparison = compare(uris[0], uris[1] if against is not None else None, changes)
    name = "-against-".join(measurement.directory.run_id for measurement in measurements)
    return MeasuredResult(comparison, write_comparison(RunDirectory(run).measured_dir, name, comparison))


def _name_prompts(file: Path) -> list[str]:
    """Settings that ask what is in the file now."""
    content = Prompts(file=str(file))
    settings = {"file": str(file), "sha256": content.digest}
    environment = json.dumps({"name": "prompts", "settings": settings})
    return [f"environment={environment}", f"evaluate.num_tasks={len(content)}"]
