"""Which policy `sf try` and `sf serve` serve, and from which folders; and greedy answers of a run's policy to
a few held-out tasks.

The evaluations of a run sample as its training does, so which of their answers are shown depends on chance.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from sf_core.cli.terminal import hide_progress_bars
from sf_core.config import RolloutConfig, RunConfig
from sf_core.engines.registry import engine_kind
from sf_core.models.images.processor_config import read_image_processor
from sf_core.process.import_path import module_environment, python_module
from sf_core.recipes.gates import All
from sf_core.reports.view import RunView
from sf_core.scheduling.cluster import scheduler_of
from sf_core.stages.preflight.resolve import read_with_derived, resolve, values_of
from sf_core.stages.preflight.sizes import PolicySizes
from sf_core.stages.start import name_dtype, start_adapter, warm_folder
from sf_core.training.backends import trainer_kind
from sf_core.training.policy_folder import check_model_folder, policy_folder
from sf_core.training.teacher_folder import check_version
from sf_core.types import WeightsRef
from storage.run_directory import RunDirectory

LONGEST_S = 60.0
"""Longest time that a command waits for the answers. With a small policy they take seconds."""


def has_greedy_answers(config: RunConfig) -> bool:
    """Whether greedy answers can be had here, and may differ from sampled ones. Judges, external agents,
    servers and workers of a cluster are not asked for them."""
    is_here = scheduler_of(config) is None and engine_kind(config).needs_torch
    asks_others = bool(config.environment.judges) or config.rollout.is_external
    return (
        is_here
        and trainer_kind(config).computes_weights
        and not asks_others
        and config.rollout.temperature > 0
    )


def ask_greedily(run: RunDirectory, version: int, task_ids: Collection[str]) -> str:
    """Have a version answer these held-out tasks in another process, which stores the answers. Returns why
    there are none; empty if there are."""
    command = python_module("sf_core.cli.serving.greedy_process", run.uri, str(version), *task_ids)
    try:
        done = subprocess.run(
            command,
            env=module_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        return f"they took longer than {LONGEST_S:.0f} s"
    return "a session failed" if done.returncode else ""


@dataclass(frozen=True, slots=True)
class Policy:
    config: RunConfig
    start_dir: str
    """Folder with tokenizer, chat template and configuration of the model."""
    weights: WeightsRef
    about: str
    """What it is, in a few words."""
    run_id: str = ""
    """Run that made it."""


def open_stored(uri: str, version: int | None, engine: str | None = None) -> Policy:
    """A version of the policy of a run, by default the newest published one. Raises ValueError with one
    sentence if there is no such run or version; it names the versions that are kept."""
    view = RunView.open(uri)
    run = view.run
    config = read_with_derived(view.run)
    if not trainer_kind(config).computes_weights:
        raise ValueError(f"run {run.run_id} is emulated and has no policy to serve")
    version = view.progress().published if version is None else version
    weights = WeightsRef(version, view.weights_of(version))
    if engine is not None:
        kind = config.engine.model_copy(update={"kind": engine})
        config = config.model_copy(update={"engine": kind})
    if read_image_processor(run.start_dir) is not None and not engine_kind(config).supports_images:
        raise ValueError(
            f"the policy of run {run.run_id} sees images, but this engine does not support images: use "
            "--engine vllm"
        )
    check_version(run, version)
    return Policy(config, run.start_dir, weights, f"version {version} of {run.run_id}", run.run_id)


def check_run(config: RunConfig) -> None:
    """Raises ValueError, one sentence, if there is no run of the name that the user has just given."""
    if config.run_id is not None:
        try:
            RunView.open(config.run_dir)
        except ValueError as error:
            raise ValueError(
                f"--set run_id={config.run_id}: {error}; leave run_id out to try the policy that a new run "
                "would start from"
            ) from None


def policy_to_try(config: RunConfig, scratch: Path) -> Policy:
    """The newest policy of the run that the configuration names, else the one that a run would start from,
    in a folder below `scratch`, with settings for this process. Raises ValueError if there is none."""
    if config.run_id is not None and RunView(RunDirectory(config.run_dir)).progress().published:
        policy = open_stored(config.run_dir, None)
    else:
        policy = _policy_to_start_from(config, scratch)
    return replace(policy, config=fit_to_this_process(policy))


def _policy_to_start_from(config: RunConfig, scratch: Path) -> Policy:
    start, about = _start_of(config, scratch)
    sizes = PolicySizes.of(config, by_a_worker=False)
    config = config.fill(values_of(resolve(config))) if sizes is None else sizes.config
    weights = start
    if sizes is not None:
        name_dtype(str(start), config.policy.dtype_name)
        if sizes.adapter is not None:
            start_adapter(str(weights := start / "adapter"), config, sizes.adapter)
    return Policy(config, str(start), WeightsRef(0, str(weights)), about)


def _start_of(config: RunConfig, scratch: Path) -> tuple[Path, str]:
    if config.policy.model is not None:
        source = Path(policy_folder(config.policy.model))
        about = config.policy.model
        check_model_folder(str(source))
    elif (source := warm_folder(config)).is_dir():
        about = "the built-in policy after its warm start"
    else:
        from sf_core.models.builtin import make_policy

        hide_progress_bars()
        make_policy(str(source := scratch / "untrained"), config.policy, config.seed)
        about = "the built-in policy, untrained: its answers are noise"
    start = scratch / "start"
    start.mkdir()
    # a trained policy has a folder with its adapter, which is no part of it
    for file in filter(Path.is_file, source.resolve().iterdir()):
        if file.name in ("config.json", "generation_config.json"):
            # they may be written again here
            shutil.copyfile(file, start / file.name)
        else:
            (start / file.name).symlink_to(file)
    return start, about


def fit_to_this_process(policy: Policy) -> RunConfig:
    """The settings with the built-in engine in place of one that starts a server, unless the policy sees, and
    with room for the few requests that one agent sends at once."""
    config = policy.config
    is_multimodal = read_image_processor(policy.start_dir) is not None
    engine = config.engine
    kind = "torch" if engine.kind == "vllm" and not is_multimodal else engine.kind
    fitting = engine.model_copy(update={"kind": kind, "max_running": min(engine.max_running, 8)})
    return config.model_copy(update={"engine": fitting})


def rules_for_single_sessions(rules: RolloutConfig, num_groups: int) -> RolloutConfig:
    """The rules of a run whose groups are of one session and external: their sessions are
    sampled as in training, without a runner."""
    own = {
        "group_size": 1,
        "groups_per_batch": num_groups,
        "outside_groups": num_groups,
        "gate": All(),
        "curriculum": None,
        "spare_sessions": 0,
        "least_sessions": None,
    }
    return rules.model_copy(update=own)
