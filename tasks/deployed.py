"""The configuration of a flow run that a deployment started: the given settings over the deployed ones; and
the run on which a flow run works.

Prefect replaces a parameter as a whole: one setting given on the command line would reset all others of the
deployment to our defaults.

A run without a name is named after the flow run. A name drawn at the start of the flow would be another one
on every retry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from prefect.client.orchestration import get_client
from prefect.runtime import deployment, flow_run
from pydantic import BeforeValidator

from sf_core.config import RunConfig
from sf_core.config.reference.form import Form, unfold
from sf_core.config.yaml_file import describe_differences, merge_sections
from sf_core.reports.log_lines import log_progress


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


def over_deployed(settings_of_run: Any) -> Any:
    """The settings given to this flow run, completed by those of its deployment; differences from the
    deployment are logged. Settings that are validated already are returned unchanged."""
    if not isinstance(settings_of_run, Mapping):
        return settings_of_run
    if (deployment_id := deployment.id) is None:
        return unfold(settings_of_run)
    with get_client(sync_client=True) as client:
        deployed = client.read_deployment(deployment_id)
    settings = unfold(deployed.parameters.get("config") or {})
    merged = merge_sections(settings, unfold(settings_of_run))
    if changed := describe_differences(settings, merged):
        sentence = f"settings as in the deployment {deployed.name}, except for {', '.join(changed)}"
        log_progress(sentence, flow_run_id=flow_run.id)
    return merged


_Deployed = BeforeValidator(over_deployed)

TrainForm = Annotated[
    RunConfig,
    _Deployed,
    Form(
        "run_id",
        *(f"train.{name}" for name in ("iterations", "learning_rate")),
        "policy.model",
        *(f"environment.{name}" for name in ("name", "tasks", "agent", "reward")),
    ),
]
"""Type of a flow's parameter `config`: validated after it is completed by the deployment. The form shows the
settings that people change first."""

WarmstartForm = Annotated[
    RunConfig, _Deployed, Form("run_id", "policy.model", "policy.warmstart", "environment.name")
]
EvaluateForm = Annotated[RunConfig, _Deployed, Form("run_id", "evaluate.num_tasks", "storage.root")]
