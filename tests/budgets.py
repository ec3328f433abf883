"""Check what may not grow unseen: Python tokens per package (`tokens` in pyproject.toml), lines of JavaScript
and CSS (`asset-lines`), and open lines of tests/flaky.md.

`make check` prints them and fails above a budget.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_FLAKY = 5
_ASSETS = {".css", ".js"}
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["seamlessflow"]
    refusals = [*_check_tokens(project["tokens"]), *_check_assets(project["asset-lines"])]
    flaky = open_flaky((ROOT / "tests" / "flaky.md").read_text(encoding="utf-8"))
    print(f"{'flaky tests':24} {len(flaky):7,} of {MOST_FLAKY:7,}")
    if len(flaky) > MOST_FLAKY:
        refusals.append(
            f"tests/flaky.md has {len(flaky)} open lines, {MOST_FLAKY} are allowed: mend one first"
        )
    print(*refusals, sep="\n", end="\n" if refusals else "", file=sys.stderr)
    return bool(refusals)


def _check_tokens(budgets: dict[str, int]) -> Iterator[str]:
    all_tokens = 0
    for package, budget in budgets.items():
        sources = list(sources_of(package, budgets))
        tokens = sum(map(count_tokens, sources))
        lines = sum(map(count_code_lines, sources))
        all_tokens += tokens
        per_line = tokens / lines if lines else 0.0
        print(f"{package:24} {tokens:7,} of {budget:7,} tokens, {per_line:.1f} per line of code")
        if tokens > budget:
            yield (
                f"{package} has {tokens:,} tokens, its budget in pyproject.toml is {budget:,}: delete some, "
                "or raise it in a decision (docs/decisions) that names what was deleted in exchange"
            )
    print(f"{'all':24} {all_tokens:7,} of {sum(budgets.values()):7,} tokens")


def _check_assets(budgets: dict[str, int]) -> Iterator[str]:
    for package, budget in budgets.items():
        files = [file for file in (ROOT / package).rglob("*") if file.suffix in _ASSETS]
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        print(f"{package:24} {lines:7,} of {budget:7,} lines of JavaScript and CSS")
        if lines > budget:
            yield (
                f"{package} has {lines:,} lines of JavaScript and CSS, its budget in pyproject.toml is "
                f"{budget:,}: delete some, or raise it in a decision (docs/decisions)"
            )


def sources_of(package: str, budgets: dict[str, int]) -> Iterator[str]:
    """Texts of a package's modules, without those of packages within it that have a budget of their own."""
    within = [ROOT / name for name in budgets if name.startswith(f"{package}/")]
    for file in sorted((ROOT / package).rglob("*.py")):
        if not any(other in file.parents for other in within):
            yield file.read_text(encoding="utf-8")


def count_tokens(source: str) -> int:
    """Tokens of code: no comments, docstrings, line ends or indentation."""
    docstrings = _docstring_lines(source)
    return sum(
        token.type not in _LAYOUT and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def count_code_lines(source: str) -> int:
    """Lines that hold code: no blanks, comments or docstrings (a string that is a statement of its own)."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(source))


def _docstring_lines(source: str) -> set[int]:
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def open_flaky(page: str) -> list[str]:
    """Rows of the page's table whose last column is empty."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| 2")]
    return [row[1].strip() for row in rows if not row[3].strip()]


if __name__ == "__main__":
    sys.exit(main())
