"""Validates what a user wrote, and says in one sentence what is wrong with it."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from sf_core.config import RunConfig, WorkerConfig
from sf_core.config.words import shown

PATTERNS = {
    "run_id": "expected at most 100 letters, digits, `.`, `_` and `-`, the first a letter or digit",
    "device": "expected cpu or cuda:N",
}
"""What the regular expression of a setting requires, in words."""


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one sentence for the user."""


def validate_config(data: dict[str, Any], source: str = "config") -> RunConfig:
    """Validate a mapping; raises ConfigError with one sentence that names every wrong key."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(_sentence(e) for e in error.errors())}") from None


def worker_config(**options: Any) -> WorkerConfig:
    """A worker from the options of `sf worker`; raises ConfigError that names the wrong option."""
    try:
        return WorkerConfig.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{option}: {_sentence(first).partition(': ')[2]}") from None


def _sentence(error: Any) -> str:
    location = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{location}: unknown key; allowed here: {', '.join(_fields_at(error['loc'][:-1]))}"
    if not location:
        return message
    if error["type"] == "string_pattern_mismatch":
        message = PATTERNS[error["loc"][-1]]
    message = message[0].lower() + message[1:]
    return f"{location}: {message}" + (
        "" if error["type"] in ("missing", "value_error") else f", got {shown(error['input'])}"
    )


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    here: Any = RunConfig
    for name in location:
        if get_origin(here) is dict:
            here = get_args(here)[1]
        else:
            here = _section(here).model_fields[str(name)].annotation
    return list(_section(here).model_fields)


def section_of(key: str) -> type[BaseModel] | None:
    """The model of the section at this dotted path; None if the path is a value or does not exist."""
    here: Any = RunConfig
    for name in key.split("."):
        field = _section(here).model_fields.get(name)
        if field is None or get_origin(field.annotation) is dict:
            return None
        here = field.annotation
        if not _sections(here):
            return None
    return _section(here)


def _section(annotation: Any) -> type[BaseModel]:
    """The model in the annotation of a section, which may be optional."""
    return _sections(annotation)[0]


def _sections(annotation: Any) -> list[type[BaseModel]]:
    return [
        a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)
    ]
