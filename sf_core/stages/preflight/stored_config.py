"""The configuration of an existing run, and what a caller may change in it.

Owns the one rule for every way to resume a run: it keeps its stored configuration, except for settings whose
given value is neither stored nor the default, and every such change is reported. A default changes nothing,
because the form in the Prefect UI sends all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

from sf_core.config import RunConfig
from sf_core.config.rollout_config import JudgeConfig
from sf_core.config.validation import is_derived, is_fixed, validate_config
from sf_core.config.yaml_file import find_differences
from sf_core.reports.view import RunView
from sf_core.settings import Changeable, quote
from sf_core.stages.preflight.resolve import read_with_derived, resolve, values_of
from storage.run_directory import RunDirectory

log = logging.getLogger(__name__)

PLACE = ("run_id", "storage")
"""Settings that name the run."""

ADDRESSES = ("cluster.scheduler", "dataplane.url")
"""Settings always taken from the caller, defaults included: the servers of the last attempt may be gone."""

_NOTHING = object()

OF_AN_EVALUATION = ("evaluate.num_tasks", "cluster.workers", *ADDRESSES)


def read_stored_config(uri: str) -> RunConfig:
    """The configuration of the run in this directory, with what was derived where it began, even if the
    directory was moved.

    Raises ValueError if there is no run."""
    directory = RunView.open(uri).run
    config = read_with_derived(directory)
    storage = config.storage.model_copy(update={"root": directory.uri.rstrip("/").rsplit("/", 1)[0]})
    return config.model_copy(update={"run_id": directory.run_id, "storage": storage})


def resolve_config(config: RunConfig, tell: Callable[[str], None] = log.warning) -> RunConfig:
    """The configuration to train with: `config`, with what follows from its settings, or that of the existing
    run that it names, with its changes. A run that begins anew is configured like one that is not there.

    Raises ValueError if they would make another run of one that has a batch, or end it before a published
    version."""
    if changed := begins_anew(config):
        tell(f"run {config.run_id} has no batch yet and starts over, with {', '.join(changed)}")
    elif RunDirectory(config.run_dir).exists():
        return _merge_with_stored(config, tell, _refuse_early_end)
    return config.fill(values_of(resolve(config)))


def begins_anew(config: RunConfig) -> list[str]:
    """What `config` changes, in words, if it makes another run of the existing run that it names. Raises
    ValueError if that has a batch."""
    changes = _changes_to_another(config)
    run = RunDirectory(config.run_dir)
    for key, before, given in changes if has_batch(run) else ():
        raise ValueError(
            f"run {run.run_id} was started with {key} {_text(before)}, not {_text(given)}; "
            f"choose another run_id, or leave {key} out"
        )
    return [f"{key} {_text(given)} (was {_text(before)})" for key, before, given in changes]


def has_batch(run: RunDirectory) -> bool:
    return run.read_manifest(0, "rollout") is not None


def has_started(config: RunConfig) -> bool:
    """Whether version 0 is there from which the run that `config` names goes on."""
    if config.run_id is None:
        return False
    run = RunDirectory(config.run_dir)
    is_there = run.read_manifest(None, "start") is not None
    return is_there and (has_batch(run) or not _changes_to_another(config))


def _changes_to_another(config: RunConfig) -> list[tuple[str, Any, Any]]:
    """Settings that make another run of the existing one, each with its former and its new value."""
    run = RunDirectory(config.run_dir)
    if not run.exists():
        return []
    return [
        (key, before, given)
        for key, before, given in _find_changes(read_with_derived(run), config)
        if is_fixed(key) and not _are_same_judges(key, before, given)
        if given != _default(key.split(".")) and not _stays_derived(key, config)
    ]


def _find_changes(stored: RunConfig, config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Key, former and new value of each setting that differs. A judge keeps the limits of the run where those
    given are defaults, which differ from the defaults of earlier runs."""
    for key, before, given in find_differences(stored, config):
        if key == "environment.judges":
            given = {name: _keep_limits(before.get(name), one) for name, one in given.items()}
        if given != before:
            yield key, before, given


def _keep_limits(before: JudgeConfig | None, given: JudgeConfig) -> JudgeConfig:
    if before is None:
        return given
    defaults = {name: JudgeConfig.model_fields[name].default for name in ("max_tokens", "timeout_s")}
    kept = [name for name, default in defaults.items() if getattr(given, name) == default]
    return given.model_copy(update={name: getattr(before, name) for name in kept})


def _are_same_judges(key: str, before: Any, given: Any) -> bool:
    fields = JudgeConfig.model_fields.items()
    changeable = {name for name, field in fields if Changeable in field.metadata}

    def identify(judges: Mapping[str, JudgeConfig]) -> dict[str, Any]:
        return {name: judge.model_dump(exclude=changeable) for name, judge in judges.items()}

    return key == "environment.judges" and identify(before) == identify(given)


def _stays_derived(key: str, config: RunConfig) -> bool:
    return is_derived(key) and config.leaves_open(key)


def resolve_for_evaluation(config: RunConfig, tell: Callable[[str], None] = log.warning) -> RunConfig:
    """The configuration to measure the stored run that `config` names.

    Raises ValueError if there is no such run, or `config` changes more than an evaluation may."""
    return _merge_with_stored(config, tell, _refuse_another_measure)


def _merge_with_stored(
    config: RunConfig, tell: Callable[[str], None], check: Callable[[RunDirectory, str, Any, Any], None]
) -> RunConfig:
    run = RunDirectory(config.run_dir)
    stored = read_with_derived(run)
    data = stored.model_dump() | config.model_dump(include=set(PLACE))
    changed = []
    kept = []
    for key, before, given in _find_changes(stored, config):
        *sections, name = path = key.split(".")
        if path[0] in PLACE or _stays_derived(key, config):
            continue
        if key in ADDRESSES or given != _default(path):
            check(run, key, before, given)
            reduce(dict.__getitem__, sections, data)[name] = given
            changed.append(f"{key} {_text(given)} (was {_text(before)})")
        elif name in reduce(getattr, sections, config).model_fields_set:
            kept.append(f"{key} {_text(before)}")
    if changed:
        tell(f"run {config.run_id}: uses its stored configuration, except for {', '.join(changed)}")
    if kept:
        tell(
            f"run {config.run_id}: a default does not override a stored setting, so the run keeps "
            f"{', '.join(kept)}"
        )
    return validate_config(data, f"run {config.run_id}")


def _default(path: list[str]) -> Any:
    """Default of a setting; equal to nothing where its section is empty by default."""
    here: Any = RunConfig()
    for name in path:
        here = getattr(here, name, _NOTHING)
    return here


def _refuse_early_end(run: RunDirectory, key: str, before: Any, given: Any) -> None:
    # the newest version would be measured and named as another one
    if key == "train.iterations" and given < (published := RunView(run).progress().published):
        raise ValueError(
            f"run {run.run_id} has already published version {published}, so {key} cannot be "
            f"{_text(given)}; set {key} to at least {published}, or leave {key} out"
        )


def _refuse_another_measure(run: RunDirectory, key: str, before: Any, given: Any) -> None:
    if key not in OF_AN_EVALUATION:
        raise ValueError(
            f"run {run.run_id} was configured with {key} {_text(before)}, not {_text(given)}, and an "
            f"evaluation must use the same {key}: leave {key} out"
        )


def _text(value: Any) -> str:
    return "none" if value is None else quote(value)
