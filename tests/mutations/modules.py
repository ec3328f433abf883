"""Definitions of the product's modules by their qualified names, wherever they are."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.mutations.patterns import Match, Pattern, find

PRODUCT = ("flows", "sf_core", "storage", "tasks")


class Modules:
    """The modules of the product below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = defaultdict[str, list[str]](list)
        """Files that define each qualified name."""
        self.parse = cache(self.parse_anew)
        for package in PRODUCT:
            for path in sorted((root / package).rglob("*.py")):
                file = path.relative_to(root).as_posix()
                for name in {name for name, _, _ in _definitions("", self.parse(file).body)}:
                    self._files[name].append(file)

    def files_of(self, name: str) -> list[str]:
        """The files that define a qualified name, such as `Grpo.__call__`."""
        return self._files.get(name, [])

    def parse_anew(self, file: str) -> ast.Module:
        """The tree of a file; what changes it changes no other."""
        return ast.parse((self._root / file).read_text(encoding="utf-8"))


def find_in(tree: ast.Module, name: str, pattern: Pattern) -> list[Match]:
    """Every place that a pattern matches in the definitions of a qualified name."""
    return [
        match
        for found, siblings, index in _definitions("", tree.body)
        if found == name
        for match in find(pattern, siblings, index)
    ]


def _definitions(prefix: str, siblings: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt], int]]:
    """Qualified name and place of each function, class, and name that is assigned outside of functions."""
    for index, statement in enumerate(siblings):
        match statement:
            case ast.ClassDef(name=name):
                yield prefix + name, siblings, index
                yield from _definitions(f"{prefix}{name}.", statement.body)
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.AnnAssign(target=ast.Name(id=name))
                | ast.Assign(targets=[ast.Name(id=name)])
            ):
                yield prefix + name, siblings, index
            case ast.If() | ast.Try() | ast.With():
                for field in ("body", "orelse", "finalbody"):
                    yield from _definitions(prefix, getattr(statement, field, []))
            case _:
                pass
