"""The pages that are made from code have all that the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from starlette.routing import Route

from docs.build.commands import commands_page
from docs.build.routes import routes_page
from docs.build.settings import settings_page
from sf_core.cli.main import app
from sf_core.config import RunConfig
from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.gateway.dialects.registry import AGENTS_PATH


def paths(section: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for name, value in section.items():
        yield f"{within}{name}"
        if isinstance(value, dict):
            yield from paths(value, f"{within}{name}.")


def test_each_setting_has_its_anchor() -> None:
    page = settings_page()
    anchors = re.findall(r"\{#([^}]+)\}", page)
    assert len(anchors) == len({*anchors})
    default = RunConfig().model_dump(mode="json")
    named = {"cluster": {"workers", "prefer"}}
    for section, names in named.items():
        default[section] = {key: None if key in names else value for key, value in default[section].items()}
    # a kind's settings are below its name
    missing = {path for path in paths(default) if path not in anchors}
    assert {
        path for path in missing if not re.match(r"train\.(advantage|loss\.policy)\.|rollout\.gate\.", path)
    } == set()
    assert {"train.advantage.gae.lam", "train.teacher.model", "cluster.workers.tags"} <= {*anchors}


def test_a_setting_says_its_type_default_and_range() -> None:
    page = settings_page()
    told = {
        "run_id": "Text (at most 100 letters, digits, `.`, `_` and `-`, the first a letter or digit) or "
        "empty. Default: empty.",
        "train.iterations": "Whole number (at least 1). Default: `40`.",
        "train.learning_rate": "Number (above 0) or empty. Default: empty.",
        "engine.kv_on_update": "One of `recompute`, `keep`. Default: `recompute`.",
        "train.betas": "List (2 entries, each number (at least 0 and below 1)). Default: `[0.9, 0.95]`.",
        "emulation.peak_flops": "Number (above 0). Default: `9.89e+14`.",
        "environment.reward": "`package.module:name` or empty. Default: empty.",
    }
    for path, text in told.items():
        assert f"`{path}` {{#{path}}}\n\n{text}\n" in page


def test_each_command_has_its_part_with_its_options() -> None:
    page = commands_page()
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        part = re.split(r"\n##+ ", page.partition(f"### `sf {name}` {{#{name}}}\n")[2])[0]
        shown = [known for known in command.params if not (known.hidden or known.name == "help")]
        assert part.count("\n- ") == len(shown)
        for parameter in shown:
            assert parameter.param_type_name == "argument" or parameter.opts[0] in part


def test_each_route_has_its_part() -> None:
    page = routes_page()
    for route in make_app("key-of-the-page").routes:
        if isinstance(route, Route):
            path = re.sub(r":\w+}", "}", route.path)
            shown = path.partition("/sessions/{session_id}")[2] if AGENTS_PATH.match(path) else path
            for method in (route.methods or set()) - {"HEAD"}:
                assert f"`{method} {shown or path}`" in page
