"""Edits of functions by patterns of their syntax trees, in the notation of Semgrep.

A pattern is an expression or statements of Python with holes:

- `$name` stands for a local name of the function. Two holes stand for two names.
- `...` as a statement, an argument or an element stands for any number of them, also for none.
  `**...` does so among keyword arguments and in a dictionary.
- `def f(self, $a, ...)` stands for a function with any further parameters, annotations and decorators.

A pattern therefore finds its place again after a local name is renamed or the function moves to another file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

_HOLE = "_hole_"
"""Prefix that makes a name of Python from the name of a hole."""

_ANY_PARAMETERS = "_any_parameters_"
"""Name of the parameter that stands for `...` between the parentheses of `def`."""

_OPEN_DEF = re.compile(r"^(\s*(?:async\s+)?def\s.*?)\.\.\.\)", re.MULTILINE)
_IGNORED = {"ctx", "kind", "type_comment", "type_params"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class PatternError(ValueError):
    """A pattern that cannot be read or filled; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Pattern:
    nodes: tuple[ast.AST, ...]
    """One expression, or statements that follow one another."""
    is_expression: bool


@dataclass(slots=True)
class Match:
    """A place that a pattern matches."""

    names: dict[str, str] = field(default_factory=dict)
    """The local name for each hole."""
    gaps: list[list[Any]] = field(default_factory=list)
    """What each `...` stands for, in the order of the pattern."""
    functions: dict[str, _Function] = field(default_factory=dict)
    """The definition for each `def` with `...)`, by its name in the pattern."""
    node: ast.AST | None = None
    """The matched expression; None if the pattern is statements."""
    statements: list[ast.stmt] = field(default_factory=list)
    """The list that contains the matched statements."""
    window: slice = field(default_factory=lambda: slice(0))
    """Which statements of the list are matched."""

    def branch(self) -> Match:
        """A copy that another attempt to match may extend."""
        return Match(dict(self.names), list(self.gaps), dict(self.functions))


def read_pattern(text: str) -> Pattern:
    """Raises PatternError if the text is no Python with holes."""
    python = re.sub(r"\$(\w+)", rf"{_HOLE}\1", text)
    python = _OPEN_DEF.sub(rf"\1*{_ANY_PARAMETERS})", python)
    try:
        statements = ast.parse(python).body
    except SyntaxError as error:
        raise PatternError(f"{text!r} is no Python: {error.msg}") from None
    match statements:
        case [ast.Expr(value=expression)]:
            return Pattern((expression,), True)
        case _:
            return Pattern(tuple(statements), False)


def find(pattern: Pattern, siblings: list[ast.stmt], index: int) -> list[Match]:
    """Every place that a pattern matches in the definition `siblings[index]`."""
    definition = siblings[index]
    matcher = _Matcher(_local_names(definition))
    if pattern.is_expression:
        return [
            match
            for node in ast.walk(definition)
            if (match := matcher.match_expression(pattern.nodes[0], node)) is not None
        ]
    starts = [(siblings, index)]
    starts += [(statements, i) for statements in _statement_lists(definition) for i in range(len(statements))]
    return [
        match
        for statements, start in starts
        if (match := matcher.match_statements(list(pattern.nodes), statements, start)) is not None
    ]


def replace(match: Match, new: Pattern, tree: ast.Module) -> None:
    """Put a replacement into the place of a match, in the tree of its module.

    Raises PatternError if the replacement has a hole or a `...` that the pattern does not have.
    """
    filler = _Filler(match)
    filled = [part for node in new.nodes for part in _as_list(filler.visit(deepcopy(node)))]
    if match.node is None:
        match.statements[match.window] = [
            ast.Expr(part) if isinstance(part, ast.expr) else part for part in filled
        ]
    else:
        _Swap(match.node, filled[0]).visit(tree)
    ast.fix_missing_locations(tree)


def _local_names(definition: ast.stmt) -> set[str]:
    """Names that a definition binds: parameters, assigned names, targets of loops, nested functions."""
    names = set[str]()
    for node in ast.walk(definition):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node is definition:
                pass
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store() | ast.Del())
                | ast.ExceptHandler(name=str(name))
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                names.add(name)
            case _:
                pass
    return names - {"self", "cls"}


def _statement_lists(definition: ast.stmt) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(definition):
        for value in vars(node).values():
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _is_ellipsis(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _is_gap(element: Any) -> bool:
    """Whether an element of a list in a pattern stands for any number of elements."""
    match element:
        case ast.Expr(value=value) | ast.keyword(arg=None, value=value) | (None, value):
            return _is_ellipsis(value)
        case _:
            return _is_ellipsis(element)


def _is_open(node: Any) -> bool:
    """Whether a definition in a pattern has any parameters."""
    return (
        isinstance(node, _Function)
        and node.args.vararg is not None
        and node.args.vararg.arg == _ANY_PARAMETERS
    )


def _items(node: ast.Dict) -> list[tuple[ast.expr | None, ast.expr]]:
    return list(zip(node.keys, node.values, strict=True))


class _Matcher:
    """Compares patterns with trees. Yields every way to match: the ways differ in what `...` stands for."""

    def __init__(self, local_names: set[str]) -> None:
        self._local_names = local_names

    def match_expression(self, pattern: ast.AST, node: ast.AST) -> Match | None:
        match = next(self._match(pattern, node, Match()), None)
        if match is not None:
            match.node = node
        return match

    def match_statements(
        self, patterns: list[ast.AST], statements: list[ast.stmt], start: int
    ) -> Match | None:
        """The shortest match that begins with `statements[start]`."""
        for end in range(start + 1, len(statements) + 1):
            for match in self._match_list(patterns, statements[start:end], Match()):
                match.statements = statements
                match.window = slice(start, end)
                return match
        return None

    def _match(self, pattern: Any, value: Any, match: Match) -> Iterator[Match]:
        if isinstance(pattern, list) and isinstance(value, list):
            yield from self._match_list(pattern, value, match)
        elif isinstance(pattern, tuple) and isinstance(value, tuple):
            yield from self._match_list(list(pattern), list(value), match)
        elif isinstance(pattern, ast.AST) and type(pattern) is type(value):
            yield from self._match_node(pattern, value, match)
        elif isinstance(pattern, str) and pattern.startswith(_HOLE):
            yield from self._bind(pattern, value, match)
        elif not isinstance(pattern, ast.AST) and type(pattern) is type(value) and pattern == value:
            yield match

    def _match_list(self, patterns: list[Any], values: list[Any], match: Match) -> Iterator[Match]:
        if not patterns:
            if not values:
                yield match
        elif _is_gap(patterns[0]):
            for length in range(len(values) + 1):
                taken = match.branch()
                taken.gaps.append(values[:length])
                yield from self._match_list(patterns[1:], values[length:], taken)
        elif values:
            for first in self._match(patterns[0], values[0], match):
                yield from self._match_list(patterns[1:], values[1:], first)

    def _match_node(self, pattern: Any, node: Any, match: Match) -> Iterator[Match]:
        if isinstance(pattern, ast.Dict):
            yield from self._match_list(_items(pattern), _items(node), match)
        elif _is_open(pattern):
            parameters = [p.arg for p in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            wanted = [parameter.arg for parameter in pattern.args.args]
            branch = match.branch()
            branch.functions[pattern.name] = node
            yield from self._match(
                [pattern.name, wanted, pattern.body],
                [node.name, parameters[: len(wanted)], node.body],
                branch,
            )
        else:
            fields = [name for name in pattern._fields if name not in _IGNORED]
            yield from self._match_list(
                [getattr(pattern, name, None) for name in fields],
                [getattr(node, name, None) for name in fields],
                match,
            )

    def _bind(self, hole: str, value: Any, match: Match) -> Iterator[Match]:
        if hole in match.names:
            if match.names[hole] == value:
                yield match
        elif value in self._local_names and value not in match.names.values():
            branch = match.branch()
            branch.names[hole] = value
            yield branch


class _Filler(ast.NodeTransformer):
    """Fills the holes of a replacement with what its pattern has matched."""

    def __init__(self, match: Match) -> None:
        self._match = match
        self._gaps = iter(match.gaps)

    def visit(self, node: ast.AST) -> Any:
        if _is_gap(node):
            return self._next_gap()
        if _is_open(node):
            return self._fill_function(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, str) and value.startswith(_HOLE):
                setattr(node, name, self._name(value))
        if isinstance(node, ast.Dict):
            return self._fill_dict(node)
        return self.generic_visit(node)

    def _next_gap(self) -> list[Any]:
        try:
            return deepcopy(next(self._gaps))
        except StopIteration:
            raise PatternError("the new text has more `...` than the old one") from None

    def _name(self, text: str) -> str:
        if not text.startswith(_HOLE):
            return text
        try:
            return self._match.names[text]
        except KeyError:
            raise PatternError(f"the old text has no ${text.removeprefix(_HOLE)}") from None

    def _fill_function(self, node: Any) -> ast.AST:
        original = self._match.functions[node.name]
        node.name = self._name(node.name)
        node.args = original.args
        node.returns = original.returns
        node.decorator_list = original.decorator_list
        node.body = [part for child in node.body for part in _as_list(self.visit(child))]
        return node

    def _fill_dict(self, node: ast.Dict) -> ast.AST:
        items = list[tuple[ast.expr | None, ast.expr]]()
        for key, value in _items(node):
            if _is_gap((key, value)):
                items += self._next_gap()
            else:
                items.append((key and self.visit(key), self.visit(value)))
        node.keys = [key for key, _ in items]
        node.values = [value for _, value in items]
        return node


class _Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old = old
        self._new = new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)


def _as_list(visited: Any) -> list[Any]:
    return visited if isinstance(visited, list) else [visited]
