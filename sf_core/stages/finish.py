"""The last task of a run: writes the trained policy, figures, timelines and the summary."""

from __future__ import annotations

from typing import Any

from sf_core.models.adapter import load_merged
from sf_core.models.language import load_with_vision_tower
from sf_core.reports.export.card import CARD, write_card
from sf_core.reports.export.trackers import write_events
from sf_core.reports.log_lines import log_progress
from sf_core.reports.summary import summarise
from sf_core.reports.timeline import record_devices, write_timelines
from sf_core.reports.view import RunView
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.backends import trainer_kind
from storage.files import copy_folder, join
from storage.tensors.weights import WEIGHT_FILES, save_weights


def finish(ref: RunRef) -> dict[str, Any]:
    """Write the trained policy as a Hugging Face folder, figures, timelines, the summary with its picture,
    and the model card. Raises ValueError if a later attempt has begun."""
    run = OpenRun(ref)
    run.directory.refuse_superseded(ref.attempt, "end the run")
    export_policy(run)
    view = RunView(run.directory)
    record_devices(view, run.config.train.iterations - 1, is_over=True)
    write_events(run.directory, run.config.train.iterations - 1)
    write_timelines(view)
    summary = summarise(view, run.config)
    if trainer_kind(run.config).computes_weights and not write_card(view, run.config):
        log_progress(f"{join(run.directory.policy_dir, CARD)} was edited and stays as it is")
    return summary


def export_policy(run: OpenRun) -> None:
    """Write RUN/policy: the start folder's configuration and tokenizer with the newest weights. Of an adapter
    these are those of the policy with it, and the adapter itself lies beside them. An emulated run gets none,
    because it computes no weights."""
    if not trainer_kind(run.config).computes_weights:
        return
    version = run.resume_point().version
    folder = run.directory.policy_dir
    dtype = run.config.policy.dtype_name
    copy_folder(run.directory.start_dir, folder, exclude=(*WEIGHT_FILES, CARD))
    newest = run.weights(version).uri
    if run.config.train.lora is None:
        weights = load_with_vision_tower(run.directory.start_dir, newest)
    else:
        copy_folder(newest, run.directory.policy_adapter_dir)
        weights = load_merged(run.directory.start_dir, newest, dtype)
    # version 0 has the dtype of policy.model
    save_weights(folder, weights, version, dtype)
