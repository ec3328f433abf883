"""The evaluate stage, which measures a policy version on held-out tasks. Also opens stored runs for it: the
newest version in the run itself, any version, and other tasks, in a run directory of their own."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sf_core.config import RunConfig
from sf_core.config.yaml_file import override_config
from sf_core.reports.evaluations.comparison import MEASURED
from sf_core.reports.states import await_restarts, check_idle
from sf_core.reports.view import RunView
from sf_core.stages.commit import Outcome, commits_once
from sf_core.stages.run import OpenRun
from sf_core.stages.stored_config import read_stored_config, settled_to_measure
from storage.files import FileRef, copy_folder, exists, join, list_files, remove
from storage.manifests import Manifest
from storage.metrics import write_metrics
from storage.run_directory import RunDirectory
from storage.tensors.weights import INDEX_NAME, WEIGHT_FILES


@commits_once
def evaluate(run: OpenRun, version: int, num_tasks: int | None = None) -> Outcome:
    """Mean reward of this version on `num_tasks` held-out tasks, by default as configured; these sessions are
    never trained on. An evaluation that has begun keeps its number of tasks. Raises ValueError if engines
    serve another version."""
    run.refuse_unserved(version)
    settings = run.config.rollout
    run.start_evaluation(version, num_tasks)
    run.dataplane.wait_for_evaluation(version, settings.batch_timeout_s, settings.absence_timeout_s)
    sealed = run.dataplane.seal_evaluation(version, run.ref.attempt)
    sealed["num_tasks"] //= run.config.evaluate.answers
    files = [FileRef(**ref) for ref in sealed.pop("files")]
    rewards = {"reward_mean": sealed["reward_mean"]}
    rewards |= {f"reward_{name}": value for name, value in sealed["by_environment"].items()}
    files.append(write_metrics(run.directory, "evaluation", version, [rewards]))
    return Outcome(outputs=files, data=sealed)


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
        parts = ", ".join(f"{name} {reward:.3f}" for name, reward in manifest.data["by_environment"].items())
        return (
            f"held-out reward of version {self.version}: {manifest.data['reward_mean']:.3f} ({parts}) "
            f"over {manifest.data['sessions']} sessions" + (", measured before" if self.measured else "")
        )


def open_evaluation(config: RunConfig, tell: Callable[[str], None] = log.warning) -> Evaluation:
    """The evaluation of the run that `config` names; if it is done already, the result is passed to `tell`.

    Raises ValueError with one sentence if there is no such run, if it is or may be in training, if it has no
    policy yet, if settings differ from those it was configured with, or if the version was already measured
    over another number of tasks."""
    if config.run_id is None:
        raise ValueError("run_id: say which run to evaluate")
    run = RunDirectory(config.run_dir)
    settled = settled_to_measure(config, tell)
    version = RunView(run).progress().published
    measured = run.read_manifest(version, "evaluate")
    if measured is None:
        if not version and run.read_manifest(None, "start") is None:
            raise ValueError(f"{run.run_id}: has no policy yet to evaluate; `sf resume {run.uri}` makes it")
        # an evaluation that began before may have died; this one continues it
        if not run.newest_attempt().evaluate_only:
            await_restarts([run], tell)
            check_idle(run)
    else:
        wanted, num_tasks = settled.evaluate.num_tasks, measured.data["num_tasks"]
        if wanted not in (num_tasks, read_stored_config(run.uri).evaluate.num_tasks):
            raise ValueError(
                f"{run.run_id}: version {version} was measured already, over {num_tasks} tasks, "
                f"not {wanted}, and is measured once; leave evaluate.num_tasks out to see the result"
            )
    evaluation = Evaluation(settled, version, measured)
    if measured is not None:
        tell(evaluation.describe())
    return evaluation


CHANGEABLE = ("environment", "evaluate", "rollout", "engine", "cluster")
"""Sections of the configuration that may differ from the run's when a version is measured apart."""


def open_measurement(uri: str, version: int | None, overrides: Sequence[str]) -> RunConfig:
    """The configuration to measure a version of a run, by default the newest, with these settings changed. It
    is that of a run directory of its own, whose version 0 is this version: so every version is asked the same
    tasks with the same seeds.

    Raises ValueError with one sentence if there is no such run, its weights of this version are gone, or
    something else than CHANGEABLE would change."""
    for override in overrides:
        if override.partition(".")[0] not in CHANGEABLE:
            raise ValueError(
                f"--set {override}: an evaluation can change {', '.join(CHANGEABLE)}, and nothing else"
            )
    run, stored = RunDirectory(uri), read_stored_config(uri)
    version = RunView(run).progress().published if version is None else version
    config = override_config(stored, list(overrides), uri)
    policy = config.policy.model_copy(update={"model": _weights_of(run, version), "warmstart": None})
    train = config.train.model_copy(update={"iterations": 1})
    storage = config.storage.model_copy(update={"root": run.path(MEASURED)})
    config = config.model_copy(update={"policy": policy, "train": train, "storage": storage, "run_id": None})
    told = config.model_dump_json(exclude={"cluster", "dataplane", "track", "train"})
    name = f"v{version:05d}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"
    config = config.model_copy(update={"run_id": name})
    _begin_measurement(run, version, config)
    return config


def end_measurement(config: RunConfig) -> None:
    """Remove the copy of the weights; the answers, and what is needed to show them, stay."""
    for uri in list_files(RunDirectory(config.run_dir).start_dir):
        if uri.endswith(".safetensors"):
            remove(uri)


def _weights_of(run: RunDirectory, version: int) -> str:
    """Folder of a version's weights."""
    kept = [0, *run.list_versions("weights")]
    if version not in kept or not exists(join(run.start_dir, "config.json")):
        published = RunView(run).progress().published
        there = ", ".join(str(one) for one in kept if one <= published)
        raise ValueError(f"{run.run_id}: the weights of version {version} are not there; these are: {there}")
    return run.weights_dir(version) if version else run.start_dir


def _begin_measurement(run: RunDirectory, version: int, config: RunConfig) -> None:
    """Write the run directory of a measurement up to its start stage, unless it is there."""
    measured = RunDirectory(config.run_dir)
    if measured.read_manifest(0, "evaluate") is not None:
        return
    started, source = time.time(), str(config.policy.model)
    copies = copy_folder(run.start_dir, measured.start_dir, exclude=WEIGHT_FILES)
    copies += [
        copy
        for copy in copy_folder(source, measured.start_dir)
        if copy.uri.endswith((".safetensors", INDEX_NAME))
    ]
    measured.write_config(config)
    times = {"started_at": started, "finished_at": time.time(), "waits": []}
    start = Manifest(
        run_id=measured.run_id,
        iteration=None,
        stage="start",
        attempt=0,
        outputs=copies,
        data={"source": source, "copied_s": 0.0, "parameters": 0, **times},
    )
    measured.commit_manifest(start)
