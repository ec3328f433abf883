"""The configuration of an existing run, and what a caller may change in it.

Owns the one rule for every way to resume a run: it keeps its stored configuration, except for settings whose
given value is neither stored nor the default, and every such change is reported. A default changes nothing,
because the form in the Prefect UI sends all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sf_core.config import RunConfig
from sf_core.config.base import Settings
from sf_core.config.validation import validate_config
from sf_core.config.words import shown
from sf_core.reports.states import progress
from storage.files import exists
from storage.run_directory import RunDirectory

log = logging.getLogger(__name__)

PLACE = ("run_id", "storage")
"""Settings that name the run."""

ADDRESSES = ("cluster.scheduler", "dataplane.url")
"""Settings always taken from the caller, defaults included: the servers of the last attempt may be gone."""

FIXED = ("seed", "policy", "environment")
"""Settings that cannot change, because the result would be another run."""

OF_AN_EVALUATION = ("evaluate.num_tasks", "cluster.workers", *ADDRESSES)


class _Difference(NamedTuple):
    key: str
    stored: Any
    given: Any
    counts: bool
    """Whether the given value takes effect."""
    is_said: bool
    """Whether the caller set it explicitly."""


def read_stored_config(uri: str) -> RunConfig:
    """The configuration of the run in this directory, even if the directory was moved.

    Raises ValueError if there is no run."""
    directory = RunDirectory(uri)
    config = directory.read_config(RunConfig)
    storage = config.storage.model_copy(update={"root": directory.uri.rstrip("/").rsplit("/", 1)[0]})
    return config.model_copy(update={"run_id": directory.run_id, "storage": storage})


def settled(config: RunConfig, tell: Callable[[str], None] = log.warning) -> RunConfig:
    """The configuration to train with: `config`, or that of the existing run that it names, with its changes.

    Raises ValueError if they would make another run of it, or end it before a published version."""
    if not exists(RunDirectory(config.run_dir).path("config.json")):
        return config
    return _merged(config, tell, _refuse_another_run)


def settled_to_measure(config: RunConfig, tell: Callable[[str], None] = log.warning) -> RunConfig:
    """The configuration to measure the stored run that `config` names.

    Raises ValueError if there is no such run, or `config` changes more than an evaluation may."""
    return _merged(config, tell, _refuse_another_measure)


def _merged(
    config: RunConfig, tell: Callable[[str], None], check: Callable[[RunDirectory, _Difference], None]
) -> RunConfig:
    run = RunDirectory(config.run_dir)
    stored = run.read_config(RunConfig)
    data = stored.model_dump() | config.model_dump(include=set(PLACE))
    changed, kept = [], []
    for difference in _differences(stored, config, RunConfig()):
        key, before, given, counts, is_said = difference
        if counts:
            check(run, difference)
            _put(data, key, given)
            changed.append(f"{key} {_text(given)} (was {_text(before)})")
        elif is_said:
            kept.append(f"{key} {_text(before)}")
    if changed:
        tell(f"run {config.run_id}: as it was configured, but for {', '.join(changed)}")
    if kept:
        tell(f"run {config.run_id}: a default changes nothing, so this stays: {', '.join(kept)}")
    return validate_config(data, f"run {config.run_id}")


def _differences(
    stored: Settings, given: Settings, usual: Settings, within: str = ""
) -> Iterator[_Difference]:
    """Differing settings in order; values that are no section are compared as a whole."""
    for name in type(stored).model_fields:
        key = within + name
        if key in PLACE:
            continue
        before, now, default = (getattr(settings, name) for settings in (stored, given, usual))
        if isinstance(before, Settings) and type(before) is type(now) is type(default):
            yield from _differences(before, now, default, f"{key}.")
        elif before != now:
            counts = now != default or key in ADDRESSES
            yield _Difference(key, before, now, counts, name in given.model_fields_set)


def _refuse_another_run(run: RunDirectory, difference: _Difference) -> None:
    key, before, given, *_ = difference
    if key.split(".")[0] in FIXED:
        raise ValueError(
            f"run {run.run_id} was started with {key} {_text(before)}, not {_text(given)}; "
            f"choose another run_id, or leave {key} out"
        )
    # the newest version would be measured and named as another one
    if key == "train.iterations" and given < (published := progress(run).published):
        raise ValueError(
            f"run {run.run_id} has published version {published} and cannot end at {key} {_text(given)}; "
            f"give at least {published}, or leave {key} out"
        )


def _refuse_another_measure(run: RunDirectory, difference: _Difference) -> None:
    key, before, given, *_ = difference
    if key not in OF_AN_EVALUATION:
        raise ValueError(
            f"run {run.run_id} was configured with {key} {_text(before)}, not {_text(given)}, "
            f"and is measured like that; leave {key} out"
        )


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        data = data[section]
    data[name] = value


def _text(value: Any) -> str:
    return "none" if value is None else shown(value)
