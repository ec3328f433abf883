"""Validates what a user wrote, and says in one sentence what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError

from sf_core.config import RunConfig, WorkerConfig
from sf_core.settings import shown

PATTERNS = {
    "image": "expected the name of an OCI image",
    "run_id": "expected at most 100 letters, digits, `.`, `_` and `-`, the first a letter or digit",
    "device": "expected cpu or cuda:N",
    "arguments": "expected --NAME or --NAME=VALUE",
    "answer": "expected output, folder or file:NAME",
}
"""What the regular expression of a setting, or of the entries of a list, requires, in words."""

_NEW_WORKER = (
    ", because a worker of another name is a new one; to edit one of those that are there, name it: "
    "--set cluster.workers.NAME.FIELD=VALUE; to have others in their place, give all of them, as "
    "cluster.workers in a file"
)


_EXPECTED = {
    "model_type": "expected a mapping of its settings",
    "dict_type": "expected a mapping",
    "tuple_type": "expected a list",
}
"""What pydantic says of these types in words of Python."""


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one sentence for the user."""


def validate_config(
    data: dict[str, Any], source: str = "config", place_of: Callable[[list[str]], str] | None = None
) -> RunConfig:
    """Validate a mapping; raises ConfigError with one sentence that names every wrong key. `place_of`: where
    the user has written the setting at this path; by default each is from `source`."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        if place_of is None:
            raise ConfigError(f"{source}: {faults(error)}") from None
        found = _found(error, RunConfig, "")
        raise ConfigError("; ".join(f"{place_of(path)}{text}" for path, text in found)) from None


def faults(error: ValidationError, model: type[BaseModel] = RunConfig, section: str = "") -> str:
    """What is wrong with settings, in one sentence that names every wrong key. `model` is what was validated,
    as the section of this name."""
    return "; ".join(text for _, text in _found(error, model, section))


def _found(error: ValidationError, model: type[BaseModel], section: str) -> Iterator[tuple[list[str], str]]:
    """Path of each wrong setting, and what is wrong with it."""
    for fault in error.errors():
        path, within = _walk(fault["loc"], model)
        yield path, _sentence(fault, ".".join([section, *path] if section else path), within)


def worker_config(**options: Any) -> WorkerConfig:
    """A worker from the options of `sf worker`; raises ConfigError that names the wrong option."""
    try:
        return WorkerConfig.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise ConfigError(_sentence(first, option, WorkerConfig)) from None


def _sentence(error: Any, location: str, section: type[BaseModel]) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{location}: unknown key; allowed here: {', '.join(section.model_fields) or 'none'}"
    if error["type"] == "union_tag_invalid":
        known = error["ctx"]["expected_tags"].replace("'", "")
        return f"{location}.kind: expected one of {known}, got {shown(error['ctx']['tag'])}"
    if not location:
        return message
    if error["type"] == "string_pattern_mismatch":
        names = [name for name in reversed(error["loc"]) if name in PATTERNS]
        message = PATTERNS[names[0]] if names else message
    message = _EXPECTED.get(error["type"], message)
    message = message[0].lower() + message[1:]
    if error["type"] == "missing" and section is WorkerConfig and location.startswith("cluster."):
        message += _NEW_WORKER
    return f"{location}: {message}" + (
        "" if error["type"] in ("missing", "value_error") else f", got {shown(error['input'])}"
    )


def _walk(location: tuple[int | str, ...], model: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """The path in a model to a value, as a user writes it, and the inner model in which its last name is."""
    here: Any = model
    section = model
    path = []
    for name in location:
        if name in (alternatives := kinds_of(here) | _tagged(here)):
            # what tells them apart is no part of the path
            here = alternatives[str(name)]
            section = next(iter(models_of(here)), section)
            continue
        path.append(str(name))
        if (origin := get_origin(here)) in (dict, tuple):
            here = get_args(here)[1 if origin is dict else 0]
        elif models := models_of(here):
            section = models[0]
            field = section.model_fields.get(str(name))
            here = None if field is None else field.annotation
    return path, section


def section_of(key: str) -> type[BaseModel] | None:
    """The model of the section at this dotted path; None if the path is a value or does not exist. A setting
    of one of several kinds is a value: another kind has other settings."""
    models = models_at(key)
    return models[0] if len(models) == 1 else None


def models_at(key: str) -> list[type[BaseModel]]:
    """What the section at this dotted path may be: several models if the section has several kinds, none if
    the path is no section."""
    models: list[type[BaseModel]] = [RunConfig]
    for name in key.split("."):
        field = models[0].model_fields.get(name) if len(models) == 1 else None
        if field is None or get_origin(field.annotation) is dict:
            return []
        models = models_of(field.annotation)
    return models


def kinds_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models among which a setting's `kind` chooses, by its values; none if it is of no union."""
    models = models_of(annotation)
    return {model.model_fields["kind"].default: model for model in models} if len(models) > 1 else {}


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models in the annotation of a section, which may be optional, or a union."""
    annotation = _bare(annotation)
    parts = map(_bare, (annotation, *get_args(annotation)))
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _tagged(annotation: Any) -> dict[str, Any]:
    """What a setting may be that is a value or a section, by the words that tell them apart in errors."""
    parts = [part for part in get_args(annotation) if get_origin(part) is Annotated]
    return {mark.tag: part for part in parts for mark in get_args(part) if isinstance(mark, Tag)}


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
