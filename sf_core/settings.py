"""What settings are made of: their base class, words, references to code, and how a wrong value is shown."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from reprlib import Repr
from typing import Annotated, Any, Self, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from sf_core.process.import_path import NAMES


def _key(name: str, _: Any) -> str:
    """Label a field of the UI form with the name that it has in the YAML file and in messages."""
    return name


def _as_form(schema: dict[str, Any]) -> None:
    """Keep the UI form in the order written here, because Prefect sorts fields alphabetically otherwise,
    offer a name as a choice also while there is only one, and say that a setting is of one of several kinds
    in the word that the form knows."""
    properties = schema.get("properties", {})
    if "const" in properties.get("kind", ()):
        # as the form offers it
        schema["title"] = properties["kind"]["const"]
    for position, field in enumerate(properties.values()):
        field.setdefault("position", position)
        if "const" in field:
            field["enum"] = [field.pop("const")]
        for place in (field, field.get("items", {})):
            if "oneOf" in place:
                place["anyOf"] = place.pop("oneOf")
                place.pop("discriminator", None)


class Settings(BaseModel):
    """Base class of all models of settings."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        # config.json, Prefect's API and its forms are JSON, which has no infinity and no NaN
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        field_title_generator=_key,
        json_schema_extra=_as_form,
    )

    def put(self, path: Sequence[str], value: Any) -> Self:
        """These settings with another value at the end of the path; not validated."""
        name, *rest = path
        return self.model_copy(update={name: getattr(self, name).put(rest, value) if rest else value})


class Derived:
    """Marks a setting that is derived where the run begins, if it is left open. A run that goes on keeps the
    derived value."""


class Fixed:
    """Marks a setting that cannot change once its run has a batch, because the result would be another run.
    In a section that is marked, all settings are fixed but those that are marked `Changeable`."""


class Changeable:
    """Marks a setting that may change although its section is fixed."""


@dataclass(frozen=True, slots=True)
class NameKind:
    """Adds `kind` to settings that have several kinds. A mapping without `kind` gets the default kind. A
    plain name stands for this kind with its defaults."""

    default: str

    def __call__(self, value: Any) -> Any:
        value = {"kind": value} if isinstance(value, str) else value
        return {"kind": self.default, **value} if isinstance(value, dict) and "kind" not in value else value


def or_kind(default: str) -> BeforeValidator:
    """Makes `kind` optional in a union of settings; see NameKind."""
    return BeforeValidator(NameKind(default))


class _Shown(Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        # the repr of a date, which YAML can hold, is a Python call
        return str(x)[: self.maxother]


_SHOWN = _Shown()
_SHOWN.maxlevel = 3
_SHOWN.maxstring = 60
_SHOWN.maxother = 80


def quote(value: Any) -> str:
    """The value on one line, with long strings and lists cut: a message about megabytes stays short.

    >>> quote("x" * 1000)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxx'"
    """
    return _SHOWN.repr(value)


REFERENCE = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""Regular expressions that a reference to code, and a tag or a worker's name, match in full."""


def is_word(value: str) -> str:
    """Returns a tag or a worker's name unchanged. Raises ValueError if Dask's `--resources` cannot hold it.

    >>> is_word("h20")
    'h20'
    """
    if not re.fullmatch(WORD, value):
        raise ValueError(f"{value!r} is not a valid tag or name: use letters, digits, '.', '_' and '-'")
    return value


def is_reference(value: str) -> str:
    """Returns a reference unchanged. Raises ValueError if it is not of the form package.module:name."""
    if not re.fullmatch(REFERENCE, value):
        raise ValueError(f"expected package.module:name, got {quote(value)}")
    return value


Reference = Annotated[str, AfterValidator(is_reference)]
"""Names Python code as package.module:name; it must be importable on the agent workers."""


def load_object(reference: str) -> Callable[..., Any]:
    """Import package.module:name. Raises ValueError with one sentence if that fails or the object is not
    callable."""
    module, _, name = reference.partition(":")
    package = module.partition(".")[0]
    hint = f"; {package} is a package of SeamlessFlow: give yours another name" if package in NAMES else ""
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # whatever the user's own lines raise
        raise ValueError(f"{reference}: cannot import {module}: {describe(error)}{hint}") from error
    try:
        function = getattr(imported, name)
    except AttributeError:
        raise ValueError(f"{reference}: module {module} has no {name}{hint}") from None
    if not callable(function):
        raise ValueError(f"{reference}: expected a function, got {type(function).__name__}")
    return cast(Callable[..., Any], function)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that names similar names; empty if there are none."""
    near = get_close_matches(name, names)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def describe(error: Exception) -> str:
    """An error with the innermost line of module-level code that it passed through."""
    message = " ".join(f"{type(error).__name__}: {error}".split())
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    return f"{message}, {lines[-1].filename} line {lines[-1].lineno}" if lines else message
