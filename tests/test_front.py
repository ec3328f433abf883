"""The package `seamlessflow` is quick to import, and has all that the code needs which we show to users."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import seamlessflow
from sf_core.process.import_path import NAMES

ROOT = Path(__file__).parents[1]

SLOW = {"torch", "transformers", "prefect", "dask", "distributed", "matplotlib", "pyarrow", "openai", "mcp"}

SHOWN = (
    "README.md",
    "docs/start/**/*.md",
    "docs/guides/**/*.md",
    "docs/reference/**/*.md",
    "docs/recipes/**/*.md",
    "examples/**/*.py",
    "examples/**/*.ipynb",
    "sf_core/cli/project/template/*",
)
"""Code that users read and copy. Decisions, concepts and CONTRIBUTING speak to people who change the code."""

INTERNAL = re.compile(rf"\s*(?:>>> )?(?:from|import)\s+(?:{'|'.join({*NAMES} - {'seamlessflow'})})\b")


def test_the_front_imports_nothing_slow() -> None:
    code = "import sys, seamlessflow; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, encoding="utf-8").split()
    assert not SLOW & {name.partition(".")[0] for name in loaded}
    assert not [name for name in loaded if name.startswith(("sf_core", "storage"))]


@pytest.mark.parametrize("name", seamlessflow.__all__)
def test_a_public_name_is_there_and_explained(name: str) -> None:
    value = getattr(seamlessflow, name)
    assert name in dir(seamlessflow)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__doc__ and not value.__doc__.startswith(f"{name}(")


def test_any_other_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"^module 'seamlessflow' has no attribute 'Taks'$"):
        _ = seamlessflow.Taks  # type: ignore[attr-defined]


def test_the_stub_says_what_a_type_checker_takes_for_public() -> None:
    stub = ast.parse((ROOT / "seamlessflow" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [alias for found in stub.body if isinstance(found, ast.ImportFrom) for alias in found.names]
    assert [alias.name for alias in imports] == [alias.asname for alias in imports]


@pytest.mark.parametrize("module", ["testing", "programs", "repositories"])
def test_a_public_module_lists_its_names(module: str) -> None:
    found = importlib.import_module(f"seamlessflow.{module}")
    assert found.__doc__ and all(hasattr(found, name) for name in found.__all__)


@pytest.mark.parametrize("module", ["", ".testing", ".programs"])
def test_the_page_of_the_front_has_every_name(module: str) -> None:
    page = (ROOT / "docs" / "reference" / "front.md").read_text(encoding="utf-8")
    shown = re.findall(rf"^::: seamlessflow{re.escape(module)}\.(\w+)$", page, re.MULTILINE)
    names = {*importlib.import_module(f"seamlessflow{module}").__all__} - {"__version__"}
    assert sorted(shown) == sorted(names)


def test_shown_code_imports_the_front_alone() -> None:
    faults = [f"{place}: {line.strip()}" for place, line in _code_lines() if INTERNAL.match(line)]
    assert not faults, "shown to users, so import it from seamlessflow:\n" + "\n".join(faults)


def _code_lines() -> Iterator[tuple[str, str]]:
    """Each line of code, and where it is."""
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            for number, cell in enumerate(json.loads(text)["cells"], 1):
                if cell["cell_type"] == "code":
                    yield from ((f"{name}: cell {number}", line) for line in cell["source"])
            continue
        # a line of prose may begin with "from tasks", so only fenced lines of pages are code
        is_code = path.suffix != ".md"
        for number, line in enumerate(text.splitlines(), 1):
            if path.suffix == ".md" and line.lstrip().startswith("```"):
                is_code = not is_code
            elif is_code:
                yield f"{name}:{number}", line
