"""Check what contracts of import-linter cannot say: that no circle leads through a package's `__init__`, that
nothing of ours is imported for type checkers alone, which hides one, and that tests share helpers by
`tests.bench` and import at most three of them. `make check` fails otherwise."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
MOST_HELPERS = 3
"""Names that a file of tests may import from `tests`."""


def main() -> int:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    refusals = [*find_faults(linter["root_packages"]), *find_faults_of_tests(ROOT)]
    print(*refusals, sep="\n", end="\n" if refusals else "", file=sys.stderr)
    return bool(refusals)


def find_faults(packages: Iterable[str]) -> Iterator[str]:
    everything, at_runtime = (_read_imports(packages, for_types) for for_types in (True, False))
    for module, imported in everything.items():
        for hidden in sorted(imported - at_runtime[module]):
            yield f"{module} imports {hidden} under TYPE_CHECKING: import it as usual, without a circle"
    try:
        TopologicalSorter(everything).prepare()
    except CycleError as error:
        yield f"imports form a circle: {' <- '.join(error.args[1])}"


def find_faults_of_tests(root: Path) -> Iterator[str]:
    for path in sorted((root / "tests").rglob("*.py")):
        file = path.relative_to(root)
        helpers = _read_helpers(root, path)
        for module in dict.fromkeys(module for module, _ in helpers):
            folder, _, last = module.rpartition(".")
            if last.startswith("test_"):
                yield f"{file} imports {module}: move what both files need into a helper module"
            elif folder != ".".join(file.parts[:-1]) and not f"{module}.".startswith("tests.bench."):
                yield f"{file} imports {module} of another folder: move it into tests/bench"
        if path.name.startswith("test_") and len(helpers) > MOST_HELPERS:
            yield (
                f"{file} imports {len(helpers)} names of helpers, more than {MOST_HELPERS}: import modules, "
                f"as in `from tests.bench.dataplane import planes`, or move the set-up into a fixture"
            )


def _read_helpers(root: Path, path: Path) -> set[tuple[str, str]]:
    """What a file imports from `tests`: modules, and names in them; the name of a module is empty."""
    found = set[tuple[str, str]]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names if alias.name.startswith("tests.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tests":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                place = root / whole.replace(".", "/")
                is_module = place.is_dir() or place.with_suffix(".py").exists()
                found.add((whole, "") if is_module else (node.module or "", alias.name))
    return found


def _read_imports(packages: Iterable[str], for_types: bool) -> dict[str, set[str]]:
    """What each module imports, with or without what is imported for type checkers alone."""
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=not for_types, cache_dir=None)
    # a flow that is called as a script imports itself
    return {m: graph.find_modules_directly_imported_by(m) - {m} for m in sorted(graph.modules)}


if __name__ == "__main__":
    sys.exit(main())
