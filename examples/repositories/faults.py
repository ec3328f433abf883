"""Faults to plant in Python sources, found by syntax tree: each a small edit inside of one function."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: (r"-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.FloorDiv: (r"//", "%"),
    ast.Mod: (r"%", "//"),
    ast.BitAnd: (r"&", "|"),
    ast.BitOr: (r"\|", "&"),
    ast.LShift: (r"<<", ">>"),
    ast.RShift: (r">>", "<<"),
}
COMPARISONS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: (r"<", "<="),
    ast.LtE: (r"<=", "<"),
    ast.Gt: (r">", ">="),
    ast.GtE: (r">=", ">"),
    ast.Eq: (r"==", "!="),
    ast.NotEq: (r"!=", "=="),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
}
BOOLEANS: dict[type[ast.AST], tuple[str, str]] = {ast.And: (r"\band\b", "or"), ast.Or: (r"\bor\b", "and")}


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    function: str
    """Its name, with those of its classes."""
    start: int
    """Offset of the first byte of the source that is replaced."""
    end: int
    """Offset of the first byte after those."""
    replacement: bytes

    def planted_in(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement + source[self.end :]


def faults_in(source: bytes) -> list[Fault]:
    """All that leave a source that can be compiled."""
    found = _Finder(source).found
    return [fault for fault in found if _compiles(fault.planted_in(source))]


class _Finder(ast.NodeVisitor):
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._within: list[str] = []
        self.found: list[Fault] = []
        for name, function in _functions(ast.parse(source)):
            self._function = name
            for statement in function.body:
                self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._swap("operator swapped", node.op, OPERATORS, node.left, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._swap("and for or", node.op, BOOLEANS, node.values[0], node.values[1])
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = pairwise([node.left, *node.comparators])
        for operator, (left, right) in zip(node.ops, sides, strict=True):
            self._swap("comparison changed", operator, COMPARISONS, left, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace("negation lost", node, self._text(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace("wrong constant", node, str(not node.value).encode())
        elif isinstance(node.value, int):
            self._replace("off by one", node, str(node.value + 1).encode())

    def visit_Call(self, node: ast.Call) -> None:
        if len(node.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
            first, second = node.args[:2]
            between = self._source[self._end(first) : self._start(second)]
            swapped = self._text(second) + between + self._text(first)
            if self._text(first) != self._text(second):
                self._add("arguments swapped", self._start(first), self._end(second), swapped)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if not node.orelse and len(node.body) == 1 and isinstance(node.body[0], ast.Return | ast.Raise):
            self._replace("case lost", node, b"pass")
        self._replace("condition negated", node.test, b"not (" + self._text(node.test) + b")")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._replace("statement lost", node, b"pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace("statement lost", node, b"pass")
        self.generic_visit(node)

    def _swap(
        self,
        kind: str,
        operator: ast.AST,
        table: dict[type[ast.AST], tuple[str, str]],
        left: ast.expr,
        right: ast.expr,
    ) -> None:
        if type(operator) not in table:
            return
        pattern, other = table[type(operator)]
        start = self._end(left)
        end = self._start(right)
        if match := re.search(pattern.encode(), self._source[start:end]):
            self._add(kind, start + match.start(), start + match.end(), other.encode())

    def _replace(self, kind: str, node: ast.expr | ast.stmt, text: bytes) -> None:
        self._add(kind, self._start(node), self._end(node), text)

    def _add(self, kind: str, start: int, end: int, text: bytes) -> None:
        self.found.append(Fault(kind, self._function, start, end, text))

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> bytes:
        return self._source[self._start(node) : self._end(node)]


def _functions(
    tree: ast.AST, within: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions of modules and classes; functions inside of functions are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield within + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{within}{node.name}.")


def without_functions(source: bytes, names: set[str]) -> bytes | None:
    """The source without these functions; None if one of them is not there, or nothing would be left of its
    class."""
    tree = ast.parse(source)
    found = {name: node for name, node in _functions(tree) if name in names}
    if found.keys() != names:
        return None
    gone = set(found.values())
    if any(isinstance(node, ast.ClassDef) and gone >= set(node.body) for node in ast.walk(tree)):
        return None
    lines: list[bytes | None] = list(source.splitlines(keepends=True))
    for node in gone:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines[first - 1 : node.end_lineno] = [None] * (node.end_lineno - first + 1)  # type: ignore[operator]
    return b"".join(line for line in lines if line is not None)


def _compiles(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
