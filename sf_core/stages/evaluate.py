"""The evaluate stage, which measures a policy version on held-out tasks. Also opens stored runs for it: the
newest version in the run itself, any version, and other tasks, in a run directory of their own."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic_core import to_json

from sf_core.config import RunConfig, TrainConfig
from sf_core.config.yaml_file import override_config
from sf_core.models.language import copy_version
from sf_core.reports.evaluations.judgements import judge_metrics
from sf_core.reports.states import await_restarts, check_idle
from sf_core.reports.view import RunView
from sf_core.stages.preflight.stored_config import read_stored_config, resolve_for_evaluation
from sf_core.stages.run import OpenRun, RunRef, StageResult, commit, commits_once
from sf_core.training.backends import trainer_kind
from sf_core.training.teacher_folder import check_version
from storage.files import FileRef, copy_folder, list_files, remove
from storage.manifests import Manifest
from storage.run_directory import RunDirectory
from storage.tables.metrics import write_metrics
from storage.tensors.weights import ADAPTER_CONFIG, INDEX_NAME, PICKLES, WEIGHT_FILES, has_weights


@commits_once
def evaluate(run: OpenRun, version: int, num_tasks: int | None = None) -> StageResult:
    """Mean reward of this version on `num_tasks` held-out tasks, by default as configured; these sessions are
    never trained on. An evaluation that has begun keeps its number of tasks. Raises ValueError if engines
    serve another version."""
    run.refuse_unserved(version)
    settings = run.config.rollout
    run.start_evaluation(version, num_tasks)
    run.dataplane.wait_for_evaluation(version, settings.batch_timeout_s, settings.absence_timeout_s)
    sealed = run.dataplane.seal_evaluation(version, run.ref.attempt)
    sealed["num_tasks"] //= run.config.evaluate.answers
    files = [FileRef(**ref) for ref in [*sealed.pop("files"), *sealed.pop("judgements", ())]]
    rewards = {"reward_mean": sealed["reward_mean"]}
    rewards |= {f"reward_{name}": value for name, value in sealed["by_environment"].items()}
    rewards |= judge_metrics(sealed)
    files.append(write_metrics(run.directory, "evaluation", version, [rewards]))
    return StageResult(outputs=files, data=sealed)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of the newest published version of a run."""

    config: RunConfig
    """The stored configuration, with the caller's number of tasks, local workers and addresses."""
    version: int
    measured: Manifest | None
    """Manifest of the evaluation if it is done already, as each version is measured once."""

    def describe(self) -> str:
        """The result in one sentence. Must be called after the evaluation is committed."""
        manifest = RunDirectory(self.config.run_dir).read_manifest(self.version, "evaluate")
        assert manifest is not None, f"version {self.version} must be measured first"
        parts = ", ".join(
            f"{name} {reward:.3f}" for name, reward in manifest.data.get("by_environment", {}).items()
        )
        unjudged = manifest.data.get("unjudged", 0)
        return (
            f"held-out reward of version {self.version}: {manifest.data['reward_mean']:.3f} ({parts}) "
            f"over {manifest.data['sessions'] - unjudged} sessions"
            + (f", {unjudged} were not judged" if unjudged else "")
            + (", measured before" if self.measured else "")
        )


def open_evaluation(config: RunConfig, report: Callable[[str], None] = log.warning) -> Evaluation:
    """The evaluation of the run that `config` names; if it is done already, the result is passed to `tell`.

    Raises ValueError with one sentence if there is no such run, if it is or may be in training, if it has no
    policy yet, if settings differ from those it was configured with, or if the version was already measured
    over another number of tasks."""
    if config.run_id is None:
        raise ValueError("run_id: name the run to evaluate")
    run = RunDirectory(config.run_dir)
    resolved = resolve_for_evaluation(config, report)
    version = RunView(run).progress().published
    measured = run.read_manifest(version, "evaluate")
    if measured is None:
        if not version and run.read_manifest(None, "start") is None:
            raise ValueError(
                f"{run.run_id}: the run has no policy to evaluate yet; continue the run with `sf resume "
                f"{run.uri}`"
            )
        if trainer_kind(resolved).computes_weights:
            check_version(run, version)
        # an evaluation that began before may have died; this one continues it
        if not run.newest_attempt().evaluate_only:
            await_restarts([run], report)
            check_idle(run)
    else:
        wanted = resolved.evaluate.num_tasks
        num_tasks = measured.data.get("num_tasks", wanted)
        if wanted not in (num_tasks, read_stored_config(run.uri).evaluate.num_tasks):
            raise ValueError(
                f"{run.run_id}: version {version} was already measured on {num_tasks} tasks, not {wanted}; "
                "leave evaluate.num_tasks out to see the result"
            )
    evaluation = Evaluation(resolved, version, measured)
    if measured is not None:
        report(evaluation.describe())
    return evaluation


CHANGEABLE = ("environment", "evaluate", "rollout", "engine", "cluster", "dataplane")
"""Sections of the configuration that may differ from the run's when a version is measured apart."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A version of a run that is measured apart, in a run directory of its own, whose version 0 it is:
    so every version is asked the same tasks with the same seeds."""

    run: RunDirectory
    version: int
    config: RunConfig
    """That of its own run directory."""

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.config.run_dir)

    @property
    def is_done(self) -> bool:
        return self.directory.read_manifest(0, "evaluate") is not None

    def begin(self) -> None:
        """Write the run directory up to its start stage, unless it is there. Raises ValueError, one sentence,
        if the weights of the version are not there."""
        directory = self.directory
        if directory.read_manifest(None, "start") is None:
            check_version(self.run, self.version)
            run = OpenRun(RunRef(directory.run_id, directory.uri, dataplane_url="", attempt=0))
            commit(run, None, "start", self._copy_policy)

    def _copy_policy(self) -> StageResult:
        target = self.directory
        weights = RunView(self.run).weights_of(self.version)
        is_adapter = self.config.train.lora is not None
        # an adapter is a version only with the weights that it is for
        exclude = PICKLES if is_adapter else WEIGHT_FILES
        copies = copy_folder(self.run.start_dir, target.start_dir, exclude=exclude)
        try:
            if is_adapter:
                copied = copy_folder(weights, target.start_adapter_dir)
            else:
                copied = copy_version(self.run.start_dir, weights, target.start_dir)
            if not has_weights(target.start_adapter_dir if is_adapter else target.start_dir):
                raise FileNotFoundError(weights)
        except (FileNotFoundError, ValueError):
            # a run that goes on has just removed it
            RunView(self.run).weights_of(self.version)
            raise
        copies += [copy for copy in copied if copy.uri.endswith((".safetensors", INDEX_NAME, ADAPTER_CONFIG))]
        self.directory.write_config(self.config)
        return StageResult(outputs=copies, data={"source": weights, "copied_s": 0.0, "parameters": 0})

    def end(self) -> None:
        """Remove the copy of the weights; the answers, and what is needed to show them, stay."""
        for folder in (self.directory.start_dir, self.directory.start_adapter_dir):
            for uri in list_files(folder):
                if uri.endswith(".safetensors"):
                    remove(uri)


def open_measurement(uri: str, version: int | None, overrides: Sequence[str]) -> Measurement:
    """The measurement of a version of a run, by default the newest, with these settings changed. Nothing is
    written. Raises ValueError with one sentence if there is no such run, or something else than CHANGEABLE
    would change."""
    for override in overrides:
        if re.split(r"[.=]", override, maxsplit=1)[0] not in CHANGEABLE:
            raise ValueError(f"--set {override}: an evaluation can only change {', '.join(CHANGEABLE)}")
    run = RunDirectory(uri)
    stored = read_stored_config(uri)
    # nothing is trained, and what training forbids does not hold
    train = TrainConfig(iterations=1, lora=stored.train.lora)
    stored = stored.model_copy(update={"train": train, "pipeline": None})
    config = override_config(stored, list(overrides), uri)
    version = RunView(run).progress().published if version is None else version
    # the same in a run directory that was moved
    identity = config.model_dump(
        mode="json", include={"seed", "environment", "rollout", "evaluate", "engine", "emulation"}
    )
    # evaluations that were stored while there was this setting are found by the same names
    identity["engine"]["vllm"] = {"url": None} | identity["engine"]["vllm"]
    name = f"v{version:05d}-{hashlib.sha256(to_json(identity)).hexdigest()[:8]}"
    # a folder tells by itself whether its policy sees
    changes = {"model": run.version_dir(version), "warmstart": None, "sees": False}
    if config.train.lora is not None:
        changes |= {"model": run.start_dir, "adapter": run.version_dir(version)}
    policy = config.policy.model_copy(update=changes)
    storage = config.storage.model_copy(update={"root": run.measured_dir})
    config = config.model_copy(update={"policy": policy, "storage": storage, "run_id": name})
    return Measurement(run, version, config)
