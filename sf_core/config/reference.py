"""Every setting with its default and what it means, as a configuration file: `sf settings`.

Says nothing of its own: names, defaults and sentences are those of sf_core/config/run_config.py.
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
    """Loads as the configuration in which nothing was changed."""
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
    """Of a mapping, what its values are."""
    arguments = get_args(annotation)
    return [a for a in arguments if isinstance(a, type) and issubclass(a, Settings)]
