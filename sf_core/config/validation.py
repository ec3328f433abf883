"""Validates what a user wrote, and says in one sentence what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError

from sf_core.config import RunConfig, WorkerConfig
from sf_core.settings import Changeable, Derived, Fixed, quote

PATTERNS = {
    "image": "expected the name of an OCI image",
    "run_id": "expected at most 100 letters, digits, `.`, `_` and `-`, the first a letter or digit",
    "device": "expected cpu or cuda:N",
    "arguments": "expected --NAME or --NAME=VALUE",
    "answer": "expected output, folder or file:NAME",
}
"""Messages for values that do not match the regular expression of a setting, by the name of the setting."""

_NEW_WORKER = (
    ", because a new name adds a worker; to change an existing worker, use its name: --set "
    "cluster.workers.NAME.FIELD=VALUE; to replace all workers, give cluster.workers in a file"
)


_EXPECTED = {
    "model_type": "expected a mapping of its settings",
    "dict_type": "expected a mapping",
    "tuple_type": "expected a list",
    "model_attributes_type": "expected the name of a kind, or a mapping of its settings",
}
"""Messages that replace pydantic's messages for errors of these types."""


_OF_A_KEY = "[key]"
"""What pydantic adds to the location of a key of a mapping that is wrong itself."""

LIKENESS = 0.7
"""Least likeness of names of which one may be meant by the other."""


class SettingPlace(NamedTuple):
    """Position of a setting in the models of a configuration."""

    path: list[str]
    """Names of the sections and of the setting, as written in YAML."""
    section: type[BaseModel]
    """Model of the section that contains the setting."""
    annotation: Any
    """Type of the setting. None if the setting is unknown, or if its type depends on the kind of a
    section."""


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one sentence for the user."""


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
        found = _explain(error, RunConfig, "")
        raise ConfigError("; ".join(f"{place_of(path)}{text}" for path, text in found)) from None


def faults(error: ValidationError, model: type[BaseModel] = RunConfig, section: str = "") -> str:
    """What is wrong with settings, in one sentence that names every wrong key. `model` is what was validated,
    as the section of this name."""
    return "; ".join(text for _, text in _explain(error, model, section))


def _explain(error: ValidationError, model: type[BaseModel], section: str) -> Iterator[tuple[list[str], str]]:
    """Path of each wrong setting, and what is wrong with it."""
    found = error.errors()
    for fault in found:
        if fault["type"] == "too_short" and any(_is_within(other["loc"], fault["loc"]) for other in found):
            # pydantic does not count the items that are wrong
            continue
        place = walk(fault["loc"], model)
        path = [section, *place.path] if section else place.path
        yield place.path, _sentence(fault, ".".join(path), place.section)


def _is_within(location: tuple[int | str, ...], section: tuple[int | str, ...]) -> bool:
    return location != section and location[: len(section)] == section


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
        near = [path for path in near_settings(location, section.model_fields) if path != location]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return f"{location}: unknown key; allowed here: {', '.join(section.model_fields) or 'none'}{hint}"
    if error["type"] == "union_tag_invalid":
        known = error["ctx"]["expected_tags"].replace("'", "")
        return f"{location}.kind: expected one of {known}, got {quote(error['ctx']['tag'])}"
    if not location:
        return message
    if error["type"] == "string_pattern_mismatch":
        names = [name for name in reversed(error["loc"]) if name in PATTERNS]
        message = PATTERNS[names[0]] if names else message
    if error["type"] == "too_short":
        least = error["ctx"]["min_length"]
        message = f"expected at least {least} item{'s' * (least > 1)}"
    message = _EXPECTED.get(error["type"], message)
    message = message[0].lower() + message[1:]
    if error["type"] == "missing" and section is WorkerConfig and location.startswith("cluster."):
        message += _NEW_WORKER
    return f"{location}: {message}" + (
        "" if error["type"] in ("missing", "value_error") else f", got {quote(error['input'])}"
    )


def walk(location: Iterable[int | str], model: type[BaseModel] = RunConfig) -> SettingPlace:
    """Where the value at this location in a model is; a location of pydantic's also names the kind of each
    section that has several, which is no part of the path that a user writes."""
    annotation: Any = model
    section = model
    path = []
    for name in map(str, location):
        if (chosen := _choices(annotation).get(name)) is not None:
            annotation = chosen
            section = next(iter(models_of(annotation)), section)
            continue
        if name == _OF_A_KEY:
            continue
        path.append(name)
        if (origin := get_origin(annotation)) in (dict, tuple):
            annotation = get_args(annotation)[1 if origin is dict else 0]
        elif len(models := models_of(annotation)) == 1:
            [section] = models
            annotation = section.model_fields[name].annotation if name in section.model_fields else None
        else:
            annotation = None
    return SettingPlace(path, section, annotation)


def markers_of(key: str) -> list[Any]:
    """What the field of this setting is marked with (sf_core/settings.py), after the markers of the sections
    around it."""
    names = key.split(".")
    sections = [walk(names[: depth + 1]).section for depth in range(len(names))]
    fields = [section.model_fields.get(name) for section, name in zip(sections, names, strict=True)]
    return [marker for field in fields if field is not None for marker in field.metadata]


def is_derived(key: str) -> bool:
    """Whether this setting is derived where the run begins, if it is left open."""
    return Derived in markers_of(key)


def is_fixed(key: str) -> bool:
    """Whether this setting cannot change once its run has a batch."""
    markers = [marker for marker in markers_of(key) if marker in (Fixed, Changeable)]
    return markers[-1:] == [Fixed]


def kinds_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models among which a setting's `kind` chooses, by its values; none if it is of no union."""
    models = models_of(annotation)
    return {model.model_fields["kind"].default: model for model in models} if len(models) > 1 else {}


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models in the annotation of a section, which may be optional, or a union; none in that of sections
    by names."""
    annotation = _bare(annotation)
    parts = () if get_origin(annotation) is dict else map(_bare, (annotation, *get_args(annotation)))
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _choices(annotation: Any) -> dict[str, Any]:
    """What a setting may be, by the words that tell it apart in errors: its kinds, or its forms."""
    forms = [part for part in get_args(annotation) if get_origin(part) is Annotated]
    tags = {mark.tag: part for part in forms for mark in get_args(part) if isinstance(mark, Tag)}
    return kinds_of(annotation) | tags


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def list_settings(model: type[BaseModel] = RunConfig, within: str = "", value: Any = None) -> Iterator[str]:
    """Paths of all settings and sections, those of every kind included, in the order of the page. A mapping
    whose keys the user names has the keys of its default."""
    value = RunConfig() if value is None and model is RunConfig else value
    for name, field in model.model_fields.items():
        yield (path := f"{within}{name}")
        own = getattr(value, name, None)
        if get_origin(field.annotation) is dict:
            models = models_of(get_args(field.annotation)[1])
            places = [f"{path}.{key}." for key in own or ()]
        else:
            models = models_of(field.annotation)
            places = [f"{path}."]
        for part in models:
            for place in places:
                yield from list_settings(part, place, own)


def near_settings(path: str, names: Collection[str] = ()) -> list[str]:
    """Paths of settings that a wrong path may mean: those with its name in other sections, else those with a
    similar name among the `names` of its section. If the section is unknown too, similar paths."""
    within, dot, name = path.rpartition(".")
    known = [*dict.fromkeys(list_settings())]
    if same := [found for found in known if found.rpartition(".")[2] == name]:
        return same[:3]
    if not names:
        return get_close_matches(path, known)
    return [f"{within}{dot}{found}" for found in get_close_matches(name, names, cutoff=LIKENESS)]
