"""What the snapshot holds, subject by subject: each function gives the lines of one file."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import click
import pyarrow as pa
import typer

import seamlessflow
from sf_core.cli.main import app as commands
from sf_core.config import RunConfig
from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.control.metrics import PlaneMetrics
from sf_core.dataplane.control.openapi import make_document
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.control.status import RunStatus
from sf_core.dataplane.gateway.observed import Metrics
from sf_core.dataplane.journal.journal_file import Event
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.sessions.turn_events import OfTurn
from sf_core.engines.wire import Frame
from sf_core.process.import_path import NAMES
from storage.tables import batches, judgements, outcomes, schema, scores
from tests.bench.snapshot.shapes import field_lines, shape

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r"SF_[A-Z][A-Z_]*[A-Z]")
SHOWN = (
    "README.md",
    "prefect.yaml",
    "configs/**/*.yaml",
    "examples/**/*.py",
    "examples/**/*.md",
    "examples/**/*.yaml",
    "examples/**/*.sh",
    "examples/**/*.ipynb",
    "docs/guides/**/*.md",
    "docs/recipes/**/*.md",
    "docs/reference/**/*.md",
    "docs/start/**/*.md",
    "sf_core/cli/**/*.yaml",
    "sf_core/config/builtin/*.yaml",
)
REFERENCE = re.compile(r"\b(?:sf_core|storage|tasks|flows)(?:\.\w+)+(?::\w+)?")


def settings() -> list[str]:
    """Paths, types and defaults of all settings."""
    return sorted(set(field_lines(RunConfig.model_json_schema())))


def tables() -> list[str]:
    """Columns of all Parquet files."""
    known = {
        "trajectories": schema.SCHEMA,
        "trajectories with images": schema.MULTIMODAL_SCHEMA,
        "batches": batches.BATCH_SCHEMA,
        "judgements": judgements.SCHEMA,
        "outcomes": outcomes.SCHEMA,
        "scores": scores.SCHEMA,
    }
    return [f"{table}: {field.name} {_type(field)}" for table, columns in known.items() for field in columns]


def _type(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"


def journal() -> list[str]:
    """Events as journals hold them, and the settings of a run within them."""
    # tests have events of their own
    ours = [event for event in _subclasses(Event) if event.__module__.startswith("sf_core.")]
    events = [event for event in ours if event is not OfTurn]
    spec = field_lines(RunSpec.model_json_schema(mode="serialization"))
    return sorted({*map(shape, events), *(f"settings: {line}" for line in spec)})


def frames() -> list[str]:
    """Frames between data plane and engines."""
    return sorted(shape(frame) for frame in _subclasses(Frame))


def _subclasses(kind: type) -> Iterator[Any]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def status() -> list[str]:
    """Keys of a run's status, which live displays and scripts read."""
    return sorted(get_type_hints(RunStatus))


def prometheus() -> list[str]:
    """Names, kinds and labels of metrics."""
    plane = DataPlane(DataplaneOptions())
    collector = PlaneMetrics(plane.runs, plane.memory)
    metrics = Metrics(collector)
    text = metrics.text().decode()
    kinds = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    own = [metric for metric in vars(metrics).values() if hasattr(metric, "_labelnames")]
    labels = {metric._name: metric._labelnames for metric in own}
    labels |= {family.name: getattr(family, "_labelnames", ()) for family in collector.collect()}
    return sorted(
        f"{name} {kind} {[*labels[name.removesuffix('_total')]]}"
        for name, kind in kinds
        if not name.endswith("_created")
    )


def routes() -> list[str]:
    """The routes of a data plane, and the bodies of its control routes."""
    app = make_app("key")
    document = make_document(app.routes)
    schemas = document["components"]["schemas"]
    lines = [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]
    lines += [f"{name}: {line}" for name, body in schemas.items() for line in field_lines(body, schemas)]
    return sorted({*lines, *(f"path {path}" for route in app.routes if (path := getattr(route, "path", "")))})


def command_line() -> list[str]:
    """Commands with their arguments and options."""
    return sorted(_parameters("sf", typer.main.get_command(commands)))


def _parameters(name: str, command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        words = ", ".join([*parameter.opts, *parameter.secondary_opts])
        yield f"{name} {words}{' (required)' if parameter.required else ''}"
    for inner, subcommand in getattr(command, "commands", {}).items():
        yield f"{name} {inner}"
        yield from _parameters(f"{name} {inner}", subcommand)


def variables() -> list[str]:
    """Environment variables of ours that the product names."""
    texts = (text for package in NAMES for text in _constants(ROOT / package))
    return sorted({text for text in texts if VARIABLE.fullmatch(text)})


def _constants(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def public_names() -> list[str]:
    """Names that users import."""
    inner = ("seamlessflow.testing", "seamlessflow.repositories", "seamlessflow.programs")
    lines = [f"{module}.{name}" for module in inner for name in importlib.import_module(module).__all__]
    return sorted([*lines, *(f"seamlessflow.{name}" for name in seamlessflow.__all__)])


def references() -> list[str]:
    """Modules and functions of ours that pages, examples and files of users name."""
    files = (file for pattern in SHOWN for file in ROOT.glob(pattern))
    named = {found for file in files for found in REFERENCE.findall(file.read_text(encoding="utf-8"))}
    return sorted(name for name in named if _is_module(name.partition(":")[0]))


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


SUBJECTS: tuple[Callable[[], list[str]], ...] = (
    settings,
    tables,
    journal,
    frames,
    status,
    prometheus,
    routes,
    command_line,
    variables,
    public_names,
    references,
)


def text_of(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
