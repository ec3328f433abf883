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


def main() -> int:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    refusals = [*find_faults(linter["root_packages"])]
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


def _read_imports(packages: Iterable[str], for_types: bool) -> dict[str, set[str]]:
    """What each module imports, with or without what is imported for type checkers alone."""
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=not for_types, cache_dir=None)
    # a flow that is called as a script imports itself
    return {m: graph.find_modules_directly_imported_by(m) - {m} for m in sorted(graph.modules)}


if __name__ == "__main__":
    sys.exit(main())
