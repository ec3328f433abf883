"""The rollout stage: waits for a full batch, which is sealed as trajectories."""

from __future__ import annotations

from sf_core.stages.run import OpenRun, StageResult, commits_once
from storage.files import FileRef


@commits_once
def rollout(run: OpenRun, iteration: int) -> StageResult:
    """Wait until the batch is full, then let the data plane seal its trajectories."""
    settings = run.config.rollout
    run.dataplane.wait_for_batch(iteration, settings.batch_timeout_s, settings.absence_timeout_s)
    sealed = run.dataplane.seal_batch(iteration, run.ref.attempt)
    files: list[FileRef] = []
    for kind in ("files", "outcomes", "judgements"):
        files += [FileRef(**ref) for ref in sealed.pop(kind, ())]
    return StageResult(outputs=files, data=sealed)
