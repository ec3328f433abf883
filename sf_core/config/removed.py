"""Settings that earlier versions had and this one has not.

A stored configuration names every setting (RUN/config.json, the parameters of a flow at a Prefect server), so
one that an earlier version stored names these too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class RemovedSetting(NamedTuple):
    default: Any
    """The value with which the setting had no effect."""
    remedy: str
    """What to do about another value."""


REMOVED = {
    "engine.vllm.url": RemovedSetting(
        None, "delete it, because each rollout worker now starts its own vLLM server"
    ),
    "cluster.elastic": RemovedSetting(
        {},
        "delete it, because a run now uses every connected worker tagged agent or reward all the time",
    ),
}
"""Removed settings by key."""


def drop_removed(data: Any) -> Any:
    """These settings, not yet validated, without the removed ones.

    Raises ValidationError, with one sentence for each, if some of them are not at their defaults."""
    faults = []
    for key, removed in REMOVED.items():
        *sections, name = path = key.split(".")
        section = reduce(_enter, sections, data)
        if not isinstance(section, Mapping) or name not in section:
            continue
        if section[name] == removed.default:
            data = _without(data, path)
        else:
            fault = PydanticCustomError("value_error", f"this setting was removed; {removed.remedy}")
            faults.append(InitErrorDetails(type=fault, loc=tuple(path), input=section[name]))
    if faults:
        raise ValidationError.from_exception_data("RunConfig", faults)
    return data


def _enter(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, Mapping) else None


def _without(section: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    name, *rest = path
    if rest:
        return {**section, name: _without(section[name], rest)}
    return {key: value for key, value in section.items() if key != name}
