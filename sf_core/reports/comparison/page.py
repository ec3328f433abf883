"""`sf report RUN RUN ...`: several runs on one HTML page that opens offline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sf_core.config import RunConfig
from sf_core.reports.comparison.figures import common_length, differing_settings, run_figures
from sf_core.reports.html.assembly import assemble
from sf_core.reports.view import RunView
from storage.files import write_atomic

SCRIPTS = ("dom.js", "theme.js", "charts.js", "tables.js", "comparison.js")

DEFAULT = "comparison.html"


def write_comparison_page(uris: Sequence[str], target: str | None) -> str:
    """Write the page, by default into the current folder, and return where it is. Raises ValueError, one
    sentence with the run, if a run is named twice or cannot be read."""
    runs = []
    configs = []
    views = [RunView.open(uri) for uri in uris]
    run_uris = [view.run.uri for view in views]
    if repeated := [uri for uri, number in Counter(run_uris).items() if number > 1]:
        raise ValueError(f"{repeated[0]} is named twice: name different runs to compare")
    for view, name in zip(views, name_runs(run_uris), strict=True):
        try:
            configs.append(view.run.read_config(RunConfig))
            runs.append(run_figures(view, name))
        except (ValueError, OSError, KeyError) as error:
            raise ValueError(f"{view.run.uri} cannot be compared: {error}") from None
    figures = {"runs": runs, "settings": differing_settings(configs)}
    names = [run["name"] for run in runs]
    page = assemble("comparison.html", SCRIPTS, {"figures": figures}, names=names, uris=run_uris)
    write_atomic(target or DEFAULT, page)
    return target or DEFAULT


def name_runs(uris: Sequence[str]) -> list[str]:
    """Names that tell the runs apart: the last part of each address, or all parts after those in common.

    >>> name_runs(["a/runs/x", "a/runs/y"]), name_runs(["a/runs/x", "b/runs/x"])
    (['x', 'y'], ['a/runs/x', 'b/runs/x'])
    """
    parts = [uri.split("/") for uri in uris]
    names = [path[-1] for path in parts]
    if len({*names}) == len(names):
        return names
    return ["/".join(path[common_length(parts) :]) or path[-1] for path in parts]
