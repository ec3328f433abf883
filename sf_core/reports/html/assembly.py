"""Puts a page together: one HTML file with its scripts, its style and its data, which opens offline.

All text of agents is embedded as compressed data and inserted as text nodes; a Content-Security-Policy allows
the page's own script and style by their hashes, pictures in data URLs, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files as package_files

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined

from sf_core.reports.html.blocks import compress


def assemble(template: str, scripts: Sequence[str], data: Mapping[str, object], **texts: object) -> bytes:
    """The page as UTF-8. `data` is embedded as JSON by name; `texts` fill the template."""
    environment = Environment(
        loader=PackageLoader("sf_core.reports.html", "assets"), autoescape=True, undefined=StrictUndefined
    )
    style = _asset("report.css")
    script = "\n".join(map(_asset, scripts))
    page = environment.get_template(template).render(
        made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        # null for NaN, which browsers cannot parse
        data={name: compress(orjson.dumps(value)) for name, value in data.items()},
        **texts,
    )
    return page.encode()


def _asset(name: str) -> str:
    return (package_files("sf_core.reports.html") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
