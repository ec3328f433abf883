"""Which answers of a model may be evaluated: some scorers of reasoning-gym hand them to Python's `eval`, or
to sympy, which does."""

from __future__ import annotations

import ast
import math
from typing import Any

FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "sqrt")
)

MAX_LENGTH = 2000

MAX_POWER = 100
"""Largest power, of a power too: greater ones may be computed forever."""

_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)


def is_literal(answer: str) -> bool:
    """Whether this is a Python literal, as a list of texts or numbers."""
    try:
        ast.literal_eval(answer)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return len(answer) <= MAX_LENGTH


def is_formula(answer: str) -> bool:
    """Whether this is one expression of numbers, letters, arithmetic, small powers and functions.

    >>> is_formula("2*x**3/3 + exp(x)"), is_formula("__import__('os').getcwd()"), is_formula("9**9**9")
    (True, False, False)
    """
    try:
        tree = ast.parse(answer, mode="eval")
        return (
            len(answer) <= MAX_LENGTH and all(map(_is_harmless, ast.walk(tree))) and _power(tree) <= MAX_POWER
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return len(node.id) == 1 or node.id in FUNCTIONS
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    return isinstance(node, _ARITHMETIC) and not isinstance(node, ast.LShift)


def _power(node: ast.AST) -> float:
    """Bound on the power to which anything in the expression is raised."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        constants: list[Any] = [
            inner.value for inner in ast.walk(node.right) if isinstance(inner, ast.Constant)
        ]
        raised = math.prod(max(1.0, abs(constant)) for constant in constants)
        return raised * _power(node.left) * _power(node.right)
    return max(map(_power, ast.iter_child_nodes(node)), default=1.0)
