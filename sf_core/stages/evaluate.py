"""The evaluate stage, which measures a policy version on held-out tasks. Also opens stored runs for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sf_core.config import RunConfig
from sf_core.reports.states import await_restarts, check_idle
from sf_core.reports.view import RunView
from sf_core.stages.commit import Outcome, commits_once
from sf_core.stages.run import OpenRun
from sf_core.stages.stored_config import read_stored_config, settled_to_measure
from storage.files import FileRef
from storage.manifests import Manifest
from storage.metrics import write_metrics
from storage.run_directory import RunDirectory


@commits_once
def evaluate(run: OpenRun, version: int, num_tasks: int | None = None) -> Outcome:
    """Mean reward of this version on `num_tasks` held-out tasks, by default as configured; these sessions are
    never trained on. An evaluation that has begun keeps its number of tasks. Raises ValueError if engines
    serve another version."""
    run.refuse_unserved(version)
    settings = run.config.rollout
    run.dataplane.start_evaluation(version, num_tasks or run.config.evaluate.num_tasks)
    run.dataplane.wait_for_evaluation(version, settings.batch_timeout_s, settings.absence_timeout_s)
    sealed = run.dataplane.seal_evaluation(version, run.ref.attempt)
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
