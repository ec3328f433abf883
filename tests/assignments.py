"""Refuse packed assignments, such as `a, b = x, y` of values that do not depend on each other. `make check`
fails if there is one in the product, its tests, benchmarks, examples or documentation.

One statement may assign several values if a later value may read what an earlier target was before, as in a
swap or a recurrence. Otherwise each value has a statement of its own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "docs", "examples", "flows", "sf_core", "storage", "tasks", "tests")


def main() -> int:
    refusals = [
        f"{path.relative_to(ROOT)}:{assignment.lineno}: `{ast.unparse(assignment)}` assigns values that do "
        "not depend on each other: write a statement for each"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for assignment in find_packed(ast.parse(path.read_text(encoding="utf-8")))
    ]
    print(*refusals, sep="\n", end="\n" if refusals else "", file=sys.stderr)
    return bool(refusals)


def find_packed(tree: ast.AST) -> Iterator[ast.Assign]:
    """The assignments of a tree that say the same as one statement for each of their values."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                if _can_be_split(targets, values):
                    yield node
            case _:
                pass


def _can_be_split(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    if len(targets) != len(values) or any(isinstance(part, ast.Starred) for part in [*targets, *values]):
        return False
    return not any(
        _reads(later, target) for place, target in enumerate(targets) for later in values[place + 1 :]
    )


def _reads(value: ast.expr, target: ast.expr) -> bool:
    """Whether a value may depend on what a target was before."""
    if isinstance(target, ast.Name):
        return any(isinstance(node, ast.Name) and node.id == target.id for node in ast.walk(value))
    if isinstance(target, ast.Tuple | ast.List):
        return any(_reads(value, part) for part in target.elts)
    assert isinstance(target, ast.Attribute | ast.Subscript)
    # a method may read what is assigned to its object
    read = {ast.unparse(node) for node in ast.walk(value) if isinstance(node, ast.Attribute | ast.Subscript)}
    called = {ast.unparse(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
    owner = ast.unparse(target.value)
    return ast.unparse(target) in read or any(name.startswith(f"{owner}.") for name in called)


if __name__ == "__main__":
    sys.exit(main())
