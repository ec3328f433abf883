"""The page of all settings, made from their models: a part for each section, an anchor for each setting."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.build.schemas import say_type, words_of
from sf_core.config import RunConfig
from sf_core.config.validation import models_of
from sf_core.settings import Reference

_TOP = """# Settings

Every setting of a run, with its type, default and range. A configuration is a YAML file with the settings
that differ from the default. `--set train.learning_rate=1e-4` overrides one setting on the command line.

- `sf settings` prints all of them as YAML that you can copy.
- `sf settings train.loss` prints one part.
- `sf settings --schema` prints the JSON Schema. An editor completes and checks your file with it.

**Empty** is YAML's `null`: the setting is left out, and its description says what happens then. `NAME`
stands for a name that you choose, and `[]` for an entry of a list. Some sections have several kinds: `kind`
names one of them, and the section then has the settings of this kind.
"""
_CODE = re.compile(r"(`[^`]+`)")


class _Part(NamedTuple):
    """A section, or one kind of it."""

    path: str
    """Dotted path of the section, as it is written in a configuration."""
    anchor: str
    model: type[BaseModel]
    level: int
    about: tuple[str, ...] = ()
    """Paragraphs on the section, before its settings."""
    kind: str = ""
    may_be: str = ""
    """Type and default of a section, if the value may also be empty, a name, or a list."""


def settings_page() -> str:
    """Markdown of the page."""
    parts = [*_parts(_Part("", "", RunConfig, 1))]
    known = {f"{part.anchor}.{name}".lstrip(".") for part in parts for name in part.model.model_fields}
    known |= {part.anchor for part in parts}
    return _TOP + "\n".join(line for part in parts for line in _show(part, known)) + "\n"


def _parts(part: _Part) -> Iterator[_Part]:
    """This section and all sections within it, in the order of the page."""
    yield part
    properties = part.model.model_json_schema()["properties"]
    for name, field in part.model.model_fields.items():
        mark, models = _models(field.annotation)
        path, anchor = (f"{before}.{name}".lstrip(".") for before in (part.path, part.anchor))
        level = max(part.level, min(part.level + 1, 3))
        if len(models) == 1:
            about = dict.fromkeys(filter(None, (field.description, inspect.getdoc(models[0]))))
            may_be = _may_be(name, properties[name], field) if field.description else ""
            yield from _parts(_Part(path + mark, anchor, models[0], level, tuple(about), may_be=may_be))
        for model in models if len(models) > 1 else ():
            kind = model.model_fields["kind"].default
            yield from _parts(_Part(path + mark, f"{anchor}.{kind}", model, 4, (model.__doc__ or "",), kind))


def _models(annotation: Any) -> tuple[str, list[type[BaseModel]]]:
    """The suffix of the path of a section (`.NAME`, `[]` or empty), and the models of the section."""
    for origin, mark in ((dict, ".NAME"), (tuple, "[]")):
        found = [part for part in (annotation, *get_args(annotation)) if get_origin(part) is origin]
        for part in found:
            if models := models_of(get_args(part)[1 if origin is dict else 0]):
                return mark, models
    return "", models_of(annotation)


def _show(part: _Part, known: set[str]) -> Iterator[str]:
    schema = part.model.model_json_schema()
    if part.level == 1:
        yield "\n## The run {#run}\n"
    elif part.kind:
        yield f"\n#### `{part.path}`: `{part.kind}` {{#{part.anchor}}}\n"
    else:
        yield f"\n{'#' * part.level} `{part.path}` {{#{part.anchor}}}\n"
    if part.may_be:
        yield f"{part.may_be}\n{{ .setting }}\n"
    for about in part.about:
        yield _prose(about, part, known) + "\n"
    inner = [
        name for name, field in part.model.model_fields.items() if len(_models(field.annotation)[1]) == 1
    ]
    anchors = [f"{part.anchor}.{name}".lstrip(".") for name in inner]
    if anchors:
        yield "Sections: " + ", ".join(f"[`{anchor}`](#{anchor})" for anchor in anchors) + ".\n"
    for name, field in part.model.model_fields.items():
        if name in inner or (name == "kind" and part.kind):
            continue
        anchor = f"{part.anchor}.{name}".lstrip(".")
        yield f"\n{'#' * max(4, part.level + 1)} `{f'{part.path}.{name}'.lstrip('.')}` {{#{anchor}}}\n"
        yield f"{_may_be(name, schema['properties'][name], field)}\n{{ .setting }}\n"
        if field.description:
            words = [str(word) for word in words_of(schema["properties"][name])]
            yield _prose(field.description, part, known, words) + "\n"
        if kinds := [model.model_fields["kind"].default for model in _models(field.annotation)[1]]:
            yield "Kinds: " + ", ".join(f"[`{kind}`](#{anchor}.{kind})" for kind in kinds) + ".\n"


def _may_be(name: str, schema: dict[str, Any], field: FieldInfo) -> str:
    told = say_type(name, schema)
    if _is_code(field):
        told = told.replace("text", "`package.module:name`", 1)
    return f"{told[0].upper()}{told[1:]}. {_default(field)}"


def _is_code(field: FieldInfo) -> bool:
    """Whether a setting names code, as package.module:name."""
    [_, check, *_] = get_args(Reference)
    forms = (field, field.annotation, *get_args(field.annotation))
    marks = (getattr(form, "metadata", getattr(form, "__metadata__", ())) for form in forms)
    return any(check in found for found in marks)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "Required."
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "Default: empty."
    if isinstance(value, BaseModel):
        shown = getattr(value, "kind", None)
        return f"Default: `{shown}`." if isinstance(shown, str) else "Default: the defaults of the section."
    if isinstance(value, float):
        return f"Default: `{value:g}`."
    plain = _plain(value)
    text = yaml.safe_dump(plain, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
    return f"Default: `{text}`."


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple | list) else value


def _prose(text: str, part: _Part, known: set[str], words: list[str] | None = None) -> str:
    """A description as Markdown: names of settings are links, and words that a setting may be are code."""
    pieces = _CODE.split(" ".join(text.split()))
    for place, piece in enumerate(pieces):
        if not piece.startswith("`"):
            piece = re.sub(r"([\[\]{}*<\\])", r"\\\1", piece).replace(r"\<", "&lt;")
            for word in words or ():
                piece = re.sub(rf"(^|(?<=[.;] )){re.escape(word)}(?=[:,])", f"`{word}`", piece)
            pieces[place] = piece
            continue
        name = re.sub(r": .*", "", piece.strip("`"))
        for anchor in (name, f"{part.anchor}.{name}"):
            if anchor in known:
                pieces[place] = f"[{piece}](#{anchor})"
                break
    return "".join(pieces)
