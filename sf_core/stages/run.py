"""A run as flows and tasks see it: RunRef is passed between them, and OpenRun opens the run that it names. A
stage runs once; afterwards it returns the data of its manifest.

Owns how a flow attempt resumes: which stages are pending, and what the data plane is told of the run.
"""

from __future__ import annotations

import functools
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sf_core.config import RunConfig
from sf_core.config.addresses import without_password
from sf_core.dataplane.control.client import DataplaneClient, DataplaneError
from sf_core.dataplane.journal.ownership import explain_other_holder
from sf_core.dataplane.operator_key import operator_key
from sf_core.engines.registry import follows_grammars
from sf_core.environments.registry import source_of_tasks
from sf_core.process.environment_variables import dataplane_url, run_key
from sf_core.reports.view import RunView
from sf_core.stages.preflight.resolve import read_with_derived
from sf_core.stages.preflight.stored_config import begins_anew
from sf_core.types import WeightsRef
from sf_core.waits import Stopwatch, collect_waits
from storage.files import FileRef, fence, read_bytes, remove
from storage.manifests import Manifest
from storage.run_directory import STAGES, Attempt, RunDirectory
from storage.unfinished import list_unfinished


@dataclass
class StageResult:
    """Inputs, outputs and data of a stage, for its manifest."""

    inputs: dict[str, str] = field(default_factory=dict)
    outputs: list[FileRef] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


Stage = Callable[..., dict[str, Any]]
"""Function of a RunRef, an iteration, and the other arguments of `work`; returns the manifest's data."""


def commits_once(work: Callable[..., StageResult], name: str = "") -> Stage:
    """Make a stage of `work`, which runs and commits only if the stage is not committed yet. The manifest has
    the name, by default that of `work`."""
    name = name or work.__name__

    def stage(ref: RunRef, iteration: int, *more: Any) -> dict[str, Any]:
        run = OpenRun(ref)
        manifest = run.directory.read_manifest(iteration, name)
        if manifest is None:
            run.report_stage(iteration, name)
            manifest = commit(run, iteration, name, lambda: work(run, iteration, *more))
        return manifest.data

    stage.__name__ = name
    stage.__doc__ = work.__doc__
    return stage


def commit(
    run: OpenRun,
    iteration: int | None,
    name: str,
    work: Callable[[], StageResult],
    check: Callable[[], None] = lambda: None,
) -> Manifest:
    """Run `work` and commit its outcome; `check` is called directly before the manifest is written."""
    watch = Stopwatch()
    with collect_waits() as waits:
        outcome = work()
    times = {"started_at": watch.since, "finished_at": watch.now, "waits": waits}
    manifest = Manifest(
        run_id=run.ref.run_id,
        iteration=iteration,
        stage=name,
        attempt=run.ref.attempt,
        inputs=outcome.inputs,
        outputs=outcome.outputs,
        data=outcome.data | times,
    )
    with fence(check):
        return run.directory.commit_manifest(manifest)


_CHECKPOINT_PARTS = 6
"""Size of a checkpoint over that of the start folder, at most."""

_NO_TIME_S = 2.0
"""What takes less to copy is small: the time is that of opening files."""


@dataclass(frozen=True, slots=True)
class RunRef:
    """Reference to a run and the attempt that works on it. Small, picklable, without secrets."""

    run_id: str
    uri: str
    """URI of the run directory."""
    dataplane_url: str
    attempt: int
    """Number of the flow attempt on this run directory; older attempts are fenced off."""
    nonce: str = ""
    """Random. Attempts of a run directory that was removed and begun again count from 1 again: processes that
    outlived the old directory tell them from the old ones by the nonce."""
    within: str = ""
    """Owner of the attempt whose warm start this is, with which its tasks end. Empty: this one owns them."""


class OpenRun:
    """An opened run: its directory, configuration and data plane."""

    def __init__(self, ref: RunRef) -> None:
        self.ref = ref
        self.directory = RunDirectory(ref.uri)

    @functools.cached_property
    def config(self) -> RunConfig:
        """The run's settings, with those that were derived and the deadlines for a policy of this size."""
        try:
            return _config_since_start(self.ref)
        except LookupError:
            return _read_config(self.ref)

    @functools.cached_property
    def dataplane(self) -> DataplaneClient:
        url = self.ref.dataplane_url
        return DataplaneClient(url, self.ref.run_id, operator_key(url))

    def report_stage(self, iteration: int, name: str) -> None:
        """Tell the data plane that a stage works. A run that samples nothing has none."""
        if self.ref.dataplane_url:
            self.dataplane.report_stage(iteration, name)

    def weights(self, version: int) -> WeightsRef:
        return WeightsRef(version, self.directory.version_dir(version))

    def list_pending_stages(self, iteration: int) -> list[str]:
        """Stages of an iteration without a manifest, in order.

        Raises ValueError if a later attempt has begun: the stages it commits would count as our own."""
        self.directory.refuse_superseded(self.ref.attempt, f"continue with iteration {iteration}")
        return [stage for stage in STAGES if self.directory.read_manifest(iteration, stage) is None]

    def resume_point(self) -> ResumePoint:
        """Where to resume, by the manifests."""
        rollouts = RunView(self.directory).read_committed("rollout")
        done_groups: set[int] = set()
        for rollout in rollouts:
            done_groups.update(map(int, rollout.data["groups"]))
            done_groups.update(map(int, rollout.data["rejected"]))
        versions = range(len(rollouts), -1, -1)
        published = next(version for version in versions if self._is_published(version))
        return ResumePoint(version=published, next_batch=len(rollouts), done_groups=sorted(done_groups))

    def iterations_left(self) -> range:
        """Iterations that still have a stage to do."""
        view = RunView(self.directory)
        first = min(len(view.read_committed(stage)) for stage in STAGES)
        return range(first, self.config.train.iterations)

    def describe_resumption(self) -> str:
        """The iteration with which this attempt continues, in words; empty for the first attempt."""
        if self.ref.attempt == 1:
            return ""
        left = self.iterations_left()
        iterations = self.config.train.iterations
        if not left:
            return f"attempt {self.ref.attempt} continues after the last iteration, with the evaluation"
        done = [stage for stage in STAGES if stage not in self.list_pending_stages(left.start)]
        stages = f", whose {' and '.join(done)} {'is' if len(done) == 1 else 'are'} committed" if done else ""
        number = f"iteration {left.start}, {left.start + 1} of {iterations}"
        return f"attempt {self.ref.attempt} continues with {number}{stages}"

    def evaluation_due(self, version: int) -> bool:
        """Whether to evaluate this version: every `evaluate.every`-th and the last one, unless committed."""
        config = self.config
        counts = version % config.evaluate.every == 0 or version == config.train.iterations
        return counts and self.directory.read_manifest(version, "evaluate") is None

    def refuse_unserved(self, version: int) -> None:
        """Raises ValueError unless this is the newest published version, which engines serve."""
        if not self._is_published(version) or self._is_published(version + 1):
            served = self.resume_point().version
            raise ValueError(
                f"{self.ref.run_id}: version {version} cannot be measured: engines serve version {served}"
            )

    def _is_published(self, version: int) -> bool:
        return version == 0 or self.directory.read_manifest(version - 1, "publish") is not None

    def begin_evaluation(self, version: int) -> None:
        """Start the evaluation of this version if it is due, so that trainers are lent for it too."""
        if self.evaluation_due(version):
            self.start_evaluation(version)

    def start_evaluation(self, version: int, num_tasks: int | None = None) -> None:
        """Start the evaluation of this version on so many tasks, by default as configured."""
        evaluate = self.config.evaluate
        self.dataplane.start_evaluation(version, (num_tasks or evaluate.num_tasks) * evaluate.answers)

    def register(self, *, evaluate_only: bool = False) -> None:
        """Register this attempt with the data plane, which keeps the sessions it already has."""
        point = self.resume_point()
        config = self.config
        judges = config.environment.judges.items()
        budgets = {name: judge.max_tokens_per_iteration for name, judge in judges}
        self.dataplane.register(
            run_id=self.ref.run_id,
            run_dir=self.ref.uri,
            model_dir=self.directory.start_dir,
            tasks=source_of_tasks(config.environment),
            seed=config.seed,
            rollout=config.rollout.model_dump(),
            lag_bound=config.lag_bound,
            context_length=config.engine.context,
            judges_groups=config.environment.group_reward is not None,
            follows_grammars=follows_grammars(config),
            was_warmed=config.policy.warm_steps > 0,
            num_batches=0 if evaluate_only else config.train.iterations,
            iteration=point.next_batch,
            version=point.version,
            weights_uri=self.weights(point.version).uri,
            done_groups=point.done_groups,
            attempt=self.ref.attempt,
            origin=self.origin,
            key=run_key(),
            judge_budgets={name: budget for name, budget in budgets.items() if budget is not None},
            scored_apart=bool(config.environment.served_judges),
        )

    @property
    def origin(self) -> str:
        """Names version 0, so that nothing of an earlier one counts. Empty: it has no name."""
        start = self.directory.read_manifest(None, "start")
        return "" if start is None else str(start.data.get("origin", ""))


@dataclass(frozen=True, slots=True)
class ResumePoint:
    version: int
    """Newest published policy version."""
    next_batch: int
    """First iteration whose rollout is not committed."""
    done_groups: list[int]
    """Group indices that were consumed or rejected."""


def begin_attempt(config: RunConfig, *, evaluate_only: bool = False) -> RunRef:
    """Open or create the run directory for a new flow attempt; older attempts are fenced off from now on. An
    attempt that only evaluates does not change the stored configuration.

    Raises ValueError if no data plane is named, if another data plane has the run open, or if an earlier
    attempt has just committed a batch of another run."""
    url = config.dataplane.url or dataplane_url()
    if url is None:
        raise ValueError(
            "no data plane: set dataplane.url or SF_DATAPLANE_URL to the address of a running `sf "
            "dataplane`, or start with `sf train`"
        )
    directory = RunDirectory(config.run_dir)
    _refuse_held(directory, url)
    attempt = Attempt(dataplane=without_password(url), host=socket.gethostname(), evaluate_only=evaluate_only)
    number = directory.begin_attempt(attempt)
    for left in list_unfinished(directory.uri):
        remove(left)
    if not evaluate_only:
        if begins_anew(config):
            directory.begin_anew()
        directory.write_config(config)
    return RunRef(directory.run_id, directory.uri, url, number, nonce=secrets.token_hex(8))


def _refuse_held(directory: RunDirectory, url: str) -> None:
    """Raises ValueError if another data plane than the one at this URL has the run open: a new attempt could
    not be registered, and would stop the one that works there."""
    if not directory.is_local:
        return
    journal = Path(directory.journal_dir, f"{directory.run_id}.journal")
    if (holder := explain_other_holder(journal)) and not _serves(url, directory.run_id):
        raise ValueError(holder)


def _serves(url: str, run_id: str) -> bool:
    """Whether the data plane has the run open, or cannot be asked: registration will tell."""
    try:
        DataplaneClient(url, run_id, operator_key(url)).status()
    except DataplaneError as error:
        return error.status != 404
    except httpx.HTTPError:
        pass
    return True


def new_run_id(name: str) -> str:
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def open_config(uri: str) -> RunConfig:
    """Read a complete configuration."""
    return RunConfig.model_validate_json(read_bytes(uri))


def _seconds_to_move(start: Manifest) -> int:
    """How long reading or writing a checkpoint may take, by how long copying the start folder took: it has
    the weights, perhaps in two bytes each, and a checkpoint twelve. Twice that, because several ranks may
    share what carries it."""
    copied_s = float(start.data.get("copied_s", 0.0))
    return 0 if copied_s < _NO_TIME_S else round(2 * _CHECKPOINT_PARTS * copied_s)


@functools.lru_cache(maxsize=8)
def _config_since_start(ref: RunRef) -> RunConfig:
    """Read once in each process. Raises LookupError as long as the start stage is not committed."""
    directory = RunDirectory(ref.uri)
    start = directory.read_manifest(None, "start")
    if start is None:
        raise LookupError(f"{ref.run_id}: the stage start is not committed")
    return read_with_derived(directory).with_time_to_move(_seconds_to_move(start))


@functools.lru_cache(maxsize=8)
def _read_config(ref: RunRef) -> RunConfig:
    return RunDirectory(ref.uri).read_config(RunConfig)
