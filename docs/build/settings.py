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
    """As a user writes it."""
    anchor: str
    model: type[BaseModel]
    level: int
    about: str
    """What the section is, before its settings."""
    kind: str = ""


def settings_page() -> str:
    """Markdown of the page."""
    parts = [*_parts(_Part("", "", RunConfig, 1, ""))]
    known = {f"{part.anchor}.{name}".lstrip(".") for part in parts for name in part.model.model_fields}
    known |= {part.anchor for part in parts}
    return _TOP + "\n".join(line for part in parts for line in _show(part, known)) + "\n"


def _parts(part: _Part) -> Iterator[_Part]:
    """This section, and all that are within it, as the page has them."""
    yield part
    for name, field in part.model.model_fields.items():
        mark, models = _models(field.annotation)
        path, anchor = (f"{before}.{name}".lstrip(".") for before in (part.path, part.anchor))
        about = field.description or (inspect.getdoc(models[0]) if len(models) == 1 else "") or ""
        level = max(part.level, min(part.level + 1, 3))
        if len(models) == 1:
            yield from _parts(_Part(path + mark, anchor, models[0], level, about))
        for model in models if len(models) > 1 else ():
            kind = model.model_fields["kind"].default
            text = inspect.getdoc(model) or ""
            yield from _parts(_Part(path + mark, f"{anchor}.{kind}", model, 4, text, kind))


def _models(annotation: Any) -> tuple[str, list[type[BaseModel]]]:
    """What may be in a section, and how a path goes on to it."""
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
    if part.about:
        yield _prose(part.about, part, known) + "\n"
    for name, field in part.model.model_fields.items():
        models = _models(field.annotation)[1]
        if (name == "kind" and part.kind) or (len(models) == 1 and field.description is None):
            continue
        anchor = f"{part.anchor}.{name}".lstrip(".")
        # a section that is also a setting has its anchor where its settings are
        mark = "" if len(models) == 1 else f" {{#{anchor}}}"
        yield f"\n{'#' * max(4, part.level + 1)} `{part.path}{'.' if part.path else ''}{name}`{mark}\n"
        told = say_type(name, schema["properties"][name])
        if _is_code(field):
            told = told.replace("Text", "`package.module:name`")
        yield f"{told}. {_default(field)}\n{{ .setting }}\n"
        if field.description:
            words = [str(word) for word in words_of(schema["properties"][name])]
            yield _prose(field.description, part, known, words) + "\n"
        if len(models) > 1:
            kinds = [model.model_fields["kind"].default for model in models]
            yield "Kinds: " + ", ".join(f"[`{kind}`](#{anchor}.{kind})" for kind in kinds) + ".\n"
        elif models:
            yield f"Its settings: [`{anchor}`](#{anchor}).\n"


def _is_code(field: FieldInfo) -> bool:
    """Whether a setting names code, as package.module:name."""
    _, *checks = get_args(Reference)
    return Reference in get_args(field.annotation) or any(check in field.metadata for check in checks)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "Required."
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "Default: empty."
    if isinstance(value, BaseModel):
        shown = getattr(value, "kind", None)
        return f"Default: `{shown}`." if isinstance(shown, str) else "Default: as below."
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
