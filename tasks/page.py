"""A run's page in Prefect: what its devices did, as a table kept up to date and a picture at the end."""

from __future__ import annotations

import base64

from prefect.artifacts import create_image_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.runtime import flow_run

from sf_core.event_files import write_events
from sf_core.observe import markdown_table, read_figures, record_figures
from sf_core.run import Run, RunRef
from storage.files import read_bytes

KEY = "devices"
"""Of the artifacts: the same for all runs, or every run would add a line to the page of artifacts."""

NUM_ROWS = 50
"""The page shows so many iterations, the last; `sf inspect` shows all."""


def show_devices(run: RunRef, iteration: int) -> None:
    """Record what the devices did up to this iteration and show it on the page of the run, which is the flow
    run above the calling one. Meant for a moment at which the flow only waits: it takes some 50 ms, the first
    time 0.2 s more."""
    directory = Run(run).directory
    record_figures(directory, iteration - 1)
    write_events(directory, iteration - 1)
    figures = read_figures(directory, range(max(0, iteration - NUM_ROWS), iteration))
    if figures:
        _put(markdown_table(figures), flow_run.parent_flow_run_id)


def show_run(run: RunRef, iterations: int) -> None:
    """Show all of it, and timeline.png, on the page of the flow run that this task belongs to."""
    directory = Run(run).directory
    figures = read_figures(directory, range(max(0, iterations - NUM_ROWS), iterations))
    _put(markdown_table(figures), flow_run.id)
    picture = base64.b64encode(read_bytes(directory.timeline_picture)).decode()
    # the picture itself, because a server cannot read the run directory
    create_image_artifact(
        f"data:image/png;base64,{picture}", key="timeline", description=directory.timeline_picture
    )


def _put(markdown: str, flow_run_id: str) -> None:
    """One artifact per run, changed in place."""
    with get_client(sync_client=True) as client:
        mine = ArtifactFilter(
            key=ArtifactFilterKey(any_=[KEY]), flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id])
        )
        found = client.read_artifacts(artifact_filter=mine)
        if found:
            client.update_artifact(found[0].id, ArtifactUpdate(data=markdown))
        else:
            client.create_artifact(
                ArtifactCreate(key=KEY, type="markdown", data=markdown, flow_run_id=flow_run_id)
            )
