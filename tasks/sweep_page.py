"""The page of a sweep in Prefect: one artifact of its flow run with the table and the picture."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.runtime import flow_run

from sf_core.sweeps.results import read_results
from sf_core.sweeps.sweep import OpenSweep
from sf_core.sweeps.table import draw, to_markdown
from storage.files import write_atomic

log = logging.getLogger(__name__)

KEY = "sweep"
"""The same for all sweeps, or every sweep would add a line to Prefect's page of artifacts."""


class SweepPage:
    """Written anew whenever a run begins or ends, and its picture as a file too. Must be made in the flow run
    that owns it."""

    def __init__(self, opened: OpenSweep) -> None:
        self._opened = opened
        self._flow_run_id = UUID(flow_run.id)

    def show(self, going_on: Sequence[str] = ()) -> None:
        try:
            self._show(going_on)
        except Exception as error:  # the sweep must not fail with its page, and the next renewal may succeed
            log.warning("the sweep's page is not up to date: %s: %s", type(error).__name__, error)

    def _show(self, going_on: Sequence[str]) -> None:
        results = read_results(self._opened)
        write_atomic(self._opened.folder.path("summary.png"), draw(self._opened, results))
        text = to_markdown(self._opened, results, going_on)
        mine = ArtifactFilter(
            key=ArtifactFilterKey(any_=[KEY]), flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id])
        )
        with get_client(sync_client=True) as client:
            # a flow run that is retried has it already
            if artifacts := client.read_artifacts(artifact_filter=mine):
                client.update_artifact(artifacts[0].id, ArtifactUpdate(data=text))
            else:
                client.create_artifact(
                    ArtifactCreate(key=KEY, type="markdown", data=text, flow_run_id=self._flow_run_id)
                )
