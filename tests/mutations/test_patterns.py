from __future__ import annotations

import ast

import pytest

from tests.mutations import patterns


def edited(source: str, old: str, new: str) -> list[str]:
    """The source with each edit that the pattern allows."""
    results = []
    for nth in range(len(patterns.find(patterns.read_pattern(old), ast.parse(source).body, 0))):
        tree = ast.parse(source)
        patterns.replace(
            patterns.find(patterns.read_pattern(old), tree.body, 0)[nth], patterns.read_pattern(new), tree
        )
        results.append(ast.unparse(tree))
    return results


@pytest.mark.parametrize(
    ("source", "old", "new", "results"),
    [
        # a hole is a local name, the same name each time
        ("def f(a, b):\n    return a - b + a", "$x - $y + $x", "$y - $x", ["def f(a, b):\n    return b - a"]),
        ("def f(a, b):\n    return a - a", "$x - $y", "$x", []),
        ("def f(a):\n    return a - limit", "$x - $y", "$x", []),
        # several places
        ("def f(a):\n    return g(a) + h(a)", "$x", "0", 2),
        # statements that follow one another
        (
            "def f(a):\n    b = a\n    c = b\n    return c",
            "$y = $x\n$z = $y",
            "$z = $x",
            ["def f(a):\n    c = a\n    return c"],
        ),
        # any statements, which stay
        (
            "def f(a):\n    if a:\n        b()\n        c()\n    return a",
            "if $x:\n    ...\nreturn $x",
            "if not $x:\n    ...\nreturn $x",
            ["def f(a):\n    if not a:\n        b()\n        c()\n    return a"],
        ),
        ("def f(a):\n    g()\n    h()", "g()\n...\nh()", "h()\n...\ng()", ["def f(a):\n    h()\n    g()"]),
        # any parameters, with their annotations
        (
            "@cache\ndef f(a: int, b: int = 2) -> int:\n    c = b\n    return c",
            "def f($a, ...):\n    ...\n    return $c",
            "def f($a, ...):\n    ...\n    return $a",
            ["@cache\ndef f(a: int, b: int=2) -> int:\n    c = b\n    return a"],
        ),
        # any arguments, elements and entries
        (
            "def f(a):\n    return g(1, a, 2, k=3, m=4, n=5)",
            "g(..., $x, ..., **..., m=4, **...)",
            "g(..., 0, ..., **..., **...)",
            ["def f(a):\n    return g(1, 0, 2, k=3, n=5)"],
        ),
        ("def f(a):\n    return [1, 2, a]", "[..., $x]", "[$x, ...]", ["def f(a):\n    return [a, 1, 2]"]),
        (
            "def f(a):\n    return {1: 2, **a, 3: a}",
            "{**..., 3: $x}",
            "{3: $x, **...}",
            ["def f(a):\n    return {3: a, 1: 2, **a}"],
        ),
        # names of exceptions, nested functions and keywords of calls
        (
            "def f():\n    try:\n        g()\n    except E as error:\n        h(error=error)",
            "try:\n    ...\nexcept E as $e:\n    h(error=$e)",
            "try:\n    ...\nexcept E as $e:\n    raise $e",
            ["def f():\n    try:\n        g()\n    except E as error:\n        raise error"],
        ),
        (
            "def f():\n    def inner(x):\n        return x\n    return inner",
            "def $g($x):\n    return $x",
            "def $g($x):\n    return 0",
            ["def f():\n\n    def inner(x):\n        return 0\n    return inner"],
        ),
        # constants by type and value
        ("def f():\n    return (1, True, 1.0)", "1", "2", ["def f():\n    return (2, True, 1.0)"]),
    ],
)
def test_holes(source: str, old: str, new: str, results: list[str] | int) -> None:
    found = edited(source, old, new)
    assert found == results or len(found) == results


def test_the_names_of_a_function_are_not_its_own() -> None:
    """A function whose name equals one of its parameters."""
    source = "def reward(task, reward):\n    return reward(task)"
    results = edited(source, "def reward($t, ...):\n    return $r($t)", "def reward($t, ...):\n    return $t")
    assert results == ["def reward(task, reward):\n    return task"]


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(patterns.PatternError, match=r"^'\$a \+' is no Python: invalid syntax$"):
        patterns.read_pattern("$a +")
