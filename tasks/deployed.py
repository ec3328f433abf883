"""The configuration of a flow run that a deployment started: the given settings over the deployed ones.

Prefect replaces a parameter as a whole: one setting given on the command line would reset all others of the
deployment to our defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from prefect.client.orchestration import get_client
from prefect.runtime import deployment, flow_run
from pydantic import BeforeValidator

from sf_core.config import RunConfig
from sf_core.config.yaml_file import describe_differences, merge_sections
from sf_core.reports.log_lines import tell


def over_deployed(given: Any) -> Any:
    """The settings given to this flow run, completed by those of its deployment; differences from the
    deployment are logged. Without a deployment the settings are returned unchanged."""
    if not isinstance(given, Mapping) or (deployment_id := deployment.id) is None:
        return given
    with get_client(sync_client=True) as client:
        deployed = client.read_deployment(deployment_id)
    settings = deployed.parameters.get("config") or {}
    merged = merge_sections(settings, given)
    if changed := describe_differences(settings, merged):
        sentence = f"settings as in the deployment {deployed.name}, except for {', '.join(changed)}"
        tell(sentence, flow_run_id=flow_run.id)
    return merged


DeployedConfig = Annotated[RunConfig, BeforeValidator(over_deployed)]
"""Type of a flow's parameter `config`: validated after it is completed by the deployment."""
