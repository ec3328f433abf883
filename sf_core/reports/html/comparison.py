"""`sf report RUN RUN ...`: several runs on one HTML page that opens offline. Their figures come from
manifests and settings.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, combinations, takewhile
from typing import Any

import numpy as np
import pyarrow.compute as pc
from pydantic_core import to_jsonable_python

from sf_core.config import RunConfig
from sf_core.config.yaml_file import find_differences
from sf_core.reports.html.page import assemble
from sf_core.reports.iterations import Iteration
from sf_core.reports.sessions import merge_branches
from sf_core.reports.view import RunView
from storage.files import write_atomic

TRAINING = ("loss", "entropy", "kl", "clip_fraction", "grad_norm", "length_mean")
"""Metrics of the train stage that are drawn."""

MOST_CHARACTERS = 80
"""Length to which the value of a setting is cut."""


def run_figures(view: RunView, name: str) -> dict[str, Any]:
    """Curves and results of one run. Raises ValueError if a committed file is broken."""
    complete = view.complete_iterations
    seconds = accumulate(iteration.seconds for iteration in complete)
    tokens = accumulate(iteration.sampled_tokens for iteration in complete)
    return {
        "name": name,
        "due": view.config.train.iterations,
        # where each iteration ends on the axes of the page
        "reached": [
            {"iterations": iteration.number + 1, "seconds": second, "tokens": token}
            for iteration, second, token in zip(complete, seconds, tokens, strict=True)
        ],
        "rows": [_iteration_figures(iteration) for iteration in complete],
        "held_out": sorted(view.held_out.items()),
        "best": _held_out_figures(view, max(view.held_out, key=view.held_out.__getitem__, default=None)),
        "last": _held_out_figures(view, max(view.held_out, default=None)),
        "failed": sum(view.failures.values()),
    }


def _iteration_figures(iteration: Iteration) -> dict[str, float | None]:
    return {name: iteration.stages["train"].data.get(name) for name in TRAINING} | {
        "reward": iteration.reward,
        "lag": iteration.lag,
        "tokens_per_second": iteration.tokens_per_second,
    }


def _held_out_figures(view: RunView, version: int | None) -> dict[str, float | None] | None:
    """Held-out reward of a version, with its standard error over tasks if the sessions are still stored."""
    if version is None:
        return None
    error = None
    with suppress(ValueError):
        error = _standard_error(view, version)
    return {"version": version, "reward": view.held_out[version], "error": error}


def _standard_error(view: RunView, version: int) -> float | None:
    """Standard error of the mean held-out reward over tasks. The reward of a task is the mean reward of its
    sessions. Raises ValueError if a file is missing."""
    session_set = view.find_session_set(version, "evaluate")
    manifest = view.manifest(version, "evaluate")
    assert session_set is not None and manifest is not None
    columns = ["session_id", "task_id", "reward"]
    sessions = merge_branches(session_set.read(columns), columns, {})
    judged = sessions.filter(pc.is_valid(sessions["reward"]))
    tasks = judged.group_by("task_id").aggregate([("reward", "mean")])
    # of a task without an answer no session is stored
    num_failed = manifest.data.get("num_tasks", 0) - len(sessions["task_id"].unique())
    failed = [view.config.rollout.failed_reward] * num_failed
    means = np.append(tasks["reward_mean"].to_numpy(), failed)
    if len(means) < 2:
        return None
    return float(means.std(ddof=1) / math.sqrt(len(means)))


def differing_settings(configs: Sequence[RunConfig]) -> list[dict[str, Any]]:
    """Settings that differ between any two runs, but for run_id, with the value that each run has."""
    differing: set[str] = set()
    for first, second in combinations(configs, 2):
        differing.update(key for key, *_ in find_differences(first, second))
    settings = []
    for key in sorted(differing - {"run_id"}):
        # of a section that some runs do not have, its settings are not listed apart
        if differing.isdisjoint(_parent_sections(key)):
            values = [_value_text(config, key) for config in configs]
            settings.append({"key": key, "values": _cut_to_difference(values)})
    return settings


def _parent_sections(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _value_text(config: RunConfig, key: str) -> str:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, str) else json.dumps(to_jsonable_python(value), ensure_ascii=False)


def _cut_to_difference(texts: Sequence[str]) -> list[str]:
    """The texts, or if one is too long, of each the part around the first character in which they differ."""
    is_long = max(map(len, texts)) > MOST_CHARACTERS
    start = max(0, common_length(texts) - MOST_CHARACTERS // 2) if is_long else 0
    parts = [text[start : start + MOST_CHARACTERS] for text in texts]
    return [
        "... " * bool(start) + part + " ..." * (len(text) > start + len(part))
        for text, part in zip(texts, parts, strict=True)
    ]


def common_length(lists: Sequence[Sequence[str]]) -> int:
    """Number of first elements that all of these have in common."""
    return sum(1 for _ in takewhile(lambda found: len({*found}) == 1, zip(*lists, strict=False)))


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
