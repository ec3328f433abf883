"""The last task of a run: writes the trained policy, figures, timelines and the summary."""

from __future__ import annotations

from typing import Any

from sf_core.reports.export.tensorboard import write_events
from sf_core.reports.series import record_devices
from sf_core.reports.summary import summarise
from sf_core.reports.timeline import write_timelines
from sf_core.reports.view import RunView
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.registry import trainer_kind
from storage.files import copy_folder
from storage.tensors.weights import WEIGHT_FILES, load_weights, save_weights


def finish(ref: RunRef) -> dict[str, Any]:
    """Write the trained policy as a Hugging Face folder, figures, timelines, the summary and its picture.
    Raises ValueError if a later attempt has begun."""
    run = OpenRun(ref)
    run.directory.refuse_superseded(ref.attempt, "end the run")
    export_policy(run)
    view = RunView(run.directory)
    record_devices(view, run.config.train.iterations - 1, is_over=True)
    write_events(run.directory, run.config.train.iterations - 1)
    write_timelines(view)
    return summarise(view, run.config)


def export_policy(run: OpenRun) -> None:
    """Write RUN/policy: the start folder's configuration and tokenizer with the newest weights. An emulated
    run gets none, because it computes no weights."""
    if not trainer_kind(run.config).computes_weights:
        return
    version = run.resume_point().version
    folder = run.directory.policy_dir
    copy_folder(run.directory.start_dir, folder, exclude=WEIGHT_FILES)
    # version 0 has the dtype of policy.model
    save_weights(folder, load_weights(run.weights(version).uri), version, run.config.policy.dtype_name)
