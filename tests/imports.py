"""Check what contracts of import-linter cannot say: that no circle leads through a package's `__init__`, and
that nothing of ours is imported for type checkers alone, which hides one. `make check` fails otherwise."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]

Imports = dict[str, set[str]]
"""Modules that a module imports, by its name."""


def main() -> int:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contract = next(one for one in linter["contracts"] if one["type"] == "acyclic_siblings")
    refusals = [*find_faults(linter["root_packages"], contract.get("ignore_imports", ()))]
    print(*refusals, sep="\n", end="\n" if refusals else "", file=sys.stderr)
    return bool(refusals)


def find_faults(packages: Iterable[str], ignored: Iterable[str] = ()) -> Iterator[str]:
    """Sentences; `ignored` are imports, each as "importer -> imported"."""
    spared = {tuple(one.split(" -> ")) for one in ignored}
    everything, at_runtime = (_read_imports(packages, for_types, spared) for for_types in (True, False))
    for module, imported in everything.items():
        for hidden in sorted(imported - at_runtime[module]):
            yield f"{module} imports {hidden} under TYPE_CHECKING: import it as usual, without a circle"
    try:
        TopologicalSorter(everything).prepare()
    except CycleError as error:
        yield f"imports form a circle: {' <- '.join(error.args[1])}"


def _read_imports(packages: Iterable[str], for_types: bool, spared: set[tuple[str, ...]]) -> Imports:
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=not for_types, cache_dir=None)
    return {
        module: {
            name
            # a flow that is called as a script imports itself
            for name in graph.find_modules_directly_imported_by(module) - {module}
            if (module, name) not in spared
        }
        for module in sorted(graph.modules)
    }


if __name__ == "__main__":
    sys.exit(main())
