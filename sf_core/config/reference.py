"""The page of `sf settings`: every setting with its default and description, as a configuration file.

Adds no text of its own: names, defaults and descriptions come from sf_core/config/run_config.py.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

import yaml

from sf_core.config import RunConfig
from sf_core.config.base import Settings

WIDTH = 110


def settings_page() -> str:
    """All settings as commented YAML, which loads as the default configuration."""
    return "\n".join(_section(RunConfig())) + "\n"


def _section(settings: Settings) -> Iterator[str]:
    plain = settings.model_dump(mode="json")
    for number, (name, field) in enumerate(type(settings).model_fields.items()):
        value = getattr(settings, name)
        section = value if isinstance(value, Settings) else None
        if number:
            yield ""
        yield from _comment(field.description or inspect.getdoc(section) or "")
        for item in _models_in(field.annotation) if section is None else ():
            yield "# Each has, beside its name:"
            for key, inner in item.model_fields.items():
                yield from _comment(f"{key}: {inner.description}", indent="  ")
        if section is None:
            # lists and inner mappings on a line of their own
            style = None if isinstance(plain[name], (list, dict)) else False
            dumped = yaml.safe_dump({name: plain[name]}, default_flow_style=style, sort_keys=False)
            yield dumped.rstrip("\n")
        else:
            yield f"{name}:"
            yield textwrap.indent("\n".join(_section(section)), "  ")


def _comment(text: str, indent: str = "") -> list[str]:
    start = f"# {indent}"
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent=start, subsequent_indent=start)


def _models_in(annotation: Any) -> list[type[Settings]]:
    """The models of settings in the annotation of a mapping's values."""
    arguments = get_args(annotation)
    return [a for a in arguments if isinstance(a, type) and issubclass(a, Settings)]
