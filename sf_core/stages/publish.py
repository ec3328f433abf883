"""The publish stage: hands the weights of the next version to every engine."""

from __future__ import annotations

import logging

from sf_core.stages.retention import find_removable_weights
from sf_core.stages.run import OpenRun, StageResult, commits_once

log = logging.getLogger(__name__)


@commits_once
def publish(run: OpenRun, iteration: int) -> StageResult:
    """Hand the weights of the train stage to every engine; done when none samples with older ones."""
    source = run.directory.read_committed(iteration, "train")
    version = int(source.data["version"])
    # it was hashed while it was written, and engines compare what they take with the digest in it
    run.directory.verify_sizes(source)
    answer = run.dataplane.publish(version, run.weights(version).uri)
    for refusal in answer.pop("refusals"):
        log.warning("%s", refusal)
    # an engine that is late, or refuses this version, has or reads an older one
    versions_in_use = answer.pop("held", ())
    # until the next version is published, an engine may still be reading the one before this
    for spare in find_removable_weights(run.directory, version - 1, run.config, versions_in_use):
        log.info("%s is removed, because train.keep_weights does not keep it", spare.name)
        spare.remove()
    return StageResult(inputs={"weights": source.outputs[0].sha256}, data={"version": version, **answer})
