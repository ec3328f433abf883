"""Which run a flow run works on: the one that its configuration names, else one named after the flow run.

A name drawn at the start of the flow would be another one on every retry.
"""

from __future__ import annotations

from prefect.runtime import flow_run

from sf_core.config import RunConfig


def identify_run(config: RunConfig) -> RunConfig:
    """The configuration with a run_id. Must be called inside a flow run."""
    if config.run_id is not None:
        return config
    return config.model_copy(update={"run_id": f"run-{str(flow_run.id)[-12:]}"})


def run_name() -> str:
    """Name of the flow run, which is that of its run."""
    return str(identify_run(flow_run.parameters["config"]).run_id)


def run_name_with_flow() -> str:
    return f"{run_name()}-{flow_run.flow_name}"
