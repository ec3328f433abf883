"""`sf report RUN`: a run as one HTML file with its scripts, its style and its data, which opens offline. Owns
the content of the page and its size.

All text of agents is embedded as compressed data and inserted as text nodes; a Content-Security-Policy allows
the page's own script and style by their hashes, images in data URLs, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.resources import files as package_files

import orjson
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from sf_core.models.token_bytes import token_bytes
from sf_core.models.tokenizer import open_tokenizer
from sf_core.reports.evaluations.judgements import judge_rows
from sf_core.reports.html.blocks import Embedded, compress, embed_sessions
from sf_core.reports.html.figures import page_figures
from sf_core.reports.view import RunView
from sf_core.reports.warnings import run_failures, run_warnings
from storage.files import write_atomic
from storage.run_directory import RunDirectory


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


SCRIPTS = (
    *("dom.js", "theme.js", "charts.js", "tables.js", "evaluations.js"),
    *("sessions.js", "viewer.js", "main.js"),
)


def write_report(uri: str, target: str | None, max_mb: float) -> str:
    """Write the page of a run, by default RUN/report.html, and return where it is.

    It takes at most `max_mb` megabytes (10^6 bytes); sessions that do not fit are left out and counted on it.
    Raises ValueError with one sentence if there is no run, a committed file is missing or broken, or the
    figures alone are larger than that.
    """
    if not 0 < max_mb < math.inf:
        raise ValueError(f"the size limit of the page must be more than 0 MB, got {max_mb:g} MB")
    view = RunView.open(uri)
    target = target or view.run.path("report.html")
    page = render(view, int(max_mb * 1e6))
    write_atomic(target, page)
    return target


def render(view: RunView, max_bytes: int) -> bytes:
    """The page as UTF-8."""
    run = view.run
    figures = page_figures(view)
    texts = _collect_texts(view)
    base = len(_render_page(run, figures, texts, Embedded()))
    if base > max_bytes:
        raise ValueError(
            f"{run.uri}: without sessions the page needs {base / 1e6:.1f} MB, but the limit is "
            f"{max_bytes / 1e6:g} MB: raise --max-mb"
        )
    # the rest is for the list of sessions and the vocabulary
    budget = int((max_bytes - base) * 0.9)
    embedded = embed_sessions(list(view.iter_session_sets()), run.media_dir, budget)
    page = _render_page(run, figures, texts, embedded)
    while len(page) > max_bytes and embedded.blocks:
        _drop_last_block(embedded)
        page = _render_page(run, figures, texts, embedded)
    return page


def _drop_last_block(embedded: Embedded) -> None:
    embedded.blocks.pop()
    first_dropped = embedded.block_of.index(len(embedded.blocks))
    del embedded.facts[first_dropped:], embedded.block_of[first_dropped:]


def _collect_texts(view: RunView) -> dict[str, object]:
    """The texts of the page: failures and warnings, and the settings of the run as YAML."""
    settings = view.config.model_dump(mode="json")
    return {
        "is_judged": bool(judge_rows(view.iterations)),
        "adapter": view.describe_adapter(),
        "warnings": run_failures(view) + run_warnings(view),
        "settings": yaml.safe_dump(settings, sort_keys=False, allow_unicode=True),
    }


def _render_page(
    run: RunDirectory, figures: dict[str, object], texts: dict[str, object], embedded: Embedded
) -> bytes:
    data = {
        "figures": figures,
        "sessions": _session_list(embedded),
        "vocabulary": _vocabulary(run, embedded),
    }
    return assemble("report.html", SCRIPTS, data, run_id=run.run_id, blocks=embedded.blocks, **texts)


def _session_list(embedded: Embedded) -> dict[str, object]:
    rows = [asdict(facts) for facts in embedded.facts]
    return {
        "columns": {name: [row[name] for row in rows] for name in (rows[0] if rows else ())},
        "block": embedded.block_of,
        "num_all": embedded.num_all,
    }


def _vocabulary(run: RunDirectory, embedded: Embedded) -> dict[str, object]:
    """Token ids and their bytes, as characters 0 to 255, which JSON can hold."""
    ids = sorted(embedded.token_ids)
    tokenizer = open_tokenizer(run) if ids else None
    return {"ids": ids, "bytes": [piece.decode("latin-1") for piece in token_bytes(tokenizer, ids)]}
