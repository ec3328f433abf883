"""Trains one run for each setting and seed of a sweep, and compares them.

Start it with `sf sweep CONFIG`, or deploy it to a Prefect server.
"""

from __future__ import annotations

import sys
from typing import Any

from prefect import flow

from flows.train import train
from sf_core.reports.log_lines import log_progress
from sf_core.stages.sweeps.expansion import SweepRequest
from sf_core.stages.sweeps.results import (
    count_states,
    describe_states,
    list_faults,
    read_results,
    to_data,
    unfinished,
)
from tasks.interruption import leave_to_successor, send_logs_at_end
from tasks.page import SweepPage
from tasks.sweeping import Runs


@flow(name="sweep", flow_run_name="{sweep.shown_name}")
def sweep(sweep: SweepRequest) -> dict[str, Any]:
    """Run what is left of the sweep; returns its table. Fails at the end if a run of it has failed."""
    with send_logs_at_end(), leave_to_successor():
        opened = sweep.open()
        page = SweepPage(opened)
        left = unfinished(opened)
        page.show()
        with Runs(train, opened, sweep.at_once, page.show) as runs:
            for run in left:
                runs.start(run, len(left))
            runs.await_all()
        results = read_results(opened)
        log_progress(f"sweep {opened.sweep.name}: {describe_states(results)}")
        if count_states(results)["failed"]:
            raise RuntimeError(f"{describe_states(results)}: {'; '.join(list_faults(results))}")
        return to_data(opened, results)


if __name__ == "__main__":
    # imported by name, as its children are
    from flows.sweep import sweep as sweep_by_name

    sweep_by_name(SweepRequest.model_validate_json(sys.argv[1]))
