"""Commits stages: a stage runs once, and afterwards returns the data of its manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sf_core.stages.run import OpenRun, RunRef
from sf_core.stopwatch import Stopwatch
from sf_core.waits import collect_waits
from storage.files import FileRef, fence
from storage.manifests import Manifest


@dataclass
class StageResult:
    """Inputs, outputs and data of a stage, for its manifest."""

    inputs: dict[str, str] = field(default_factory=dict)
    outputs: list[FileRef] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


Stage = Callable[..., dict[str, Any]]
"""Function of a RunRef, an iteration, and the other arguments of `work`; returns the manifest's data."""


def commits_once(work: Callable[..., StageResult], name: str = "") -> Stage:
    """Make a stage of `work`, which runs and commits only if the stage is not committed yet. The manifest has
    the name, by default that of `work`."""
    name = name or work.__name__

    def stage(ref: RunRef, iteration: int, *more: Any) -> dict[str, Any]:
        run = OpenRun(ref)
        manifest = run.directory.read_manifest(iteration, name)
        if manifest is None:
            run.report_stage(iteration, name)
            manifest = commit(run, iteration, name, lambda: work(run, iteration, *more))
        return manifest.data

    stage.__name__ = name
    stage.__doc__ = work.__doc__
    return stage


def commit(
    run: OpenRun,
    iteration: int | None,
    name: str,
    work: Callable[[], StageResult],
    check: Callable[[], None] = lambda: None,
) -> Manifest:
    """Run `work` and commit its outcome; `check` is called directly before the manifest is written."""
    watch = Stopwatch()
    with collect_waits() as waits:
        outcome = work()
    times = {"started_at": watch.since, "finished_at": watch.now, "waits": waits}
    manifest = Manifest(
        run_id=run.ref.run_id,
        iteration=iteration,
        stage=name,
        attempt=run.ref.attempt,
        inputs=outcome.inputs,
        outputs=outcome.outputs,
        data=outcome.data | times,
    )
    with fence(check):
        return run.directory.commit_manifest(manifest)
