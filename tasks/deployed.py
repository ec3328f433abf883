"""The configuration of a flow run that a deployment started: what was given, over what is deployed.

Prefect replaces a parameter as a whole: one value given on the command line would take all others of the
deployment back to our defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from prefect.client.orchestration import get_client
from prefect.runtime import deployment, flow_run
from pydantic import BeforeValidator

from sf_core.config import RunConfig
from sf_core.config.yaml_file import differences, merge_sections

log = logging.getLogger(__name__)


def over_deployed(given: Any) -> Any:
    """The settings of this flow run as they were given, and those of its deployment where none was. Each
    that differs from the deployment's is logged. What no deployment started is left as it is."""
    if not isinstance(given, Mapping) or (deployment_id := deployment.id) is None:
        return given
    with get_client(sync_client=True) as client:
        deployed = client.read_deployment(deployment_id)
    settings = deployed.parameters.get("config") or {}
    merged = merge_sections(settings, given)
    if changed := differences(settings, merged):
        sentence = f"as deployed by {deployed.name}, but for {', '.join(changed)}"
        # Prefect looks for the run that a line belongs to in the context, which is made after this
        log.warning(sentence, extra={"flow_run_id": flow_run.id})
    return merged


DeployedConfig = Annotated[RunConfig, BeforeValidator(over_deployed)]
"""What a flow takes as its `config`; to be validated when it is complete."""
