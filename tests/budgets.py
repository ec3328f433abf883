"""Check what may not grow unseen: code lines per package (`[tool.seamlessflow.code-lines]` in pyproject.toml)
and open lines of tests/flaky.md. `make check` prints them and fails above a budget."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_FLAKY = 5
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def main() -> int:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["seamlessflow"][
        "code-lines"
    ]
    counted = {package: count_package(package, budgets) for package in budgets}
    refusals = []
    for package, budget in budgets.items():
        lines = counted[package]
        print(f"{package:24} {lines:6,} of {budget:6,} code lines")
        if lines > budget:
            refusals.append(
                f"{package} has {lines:,} code lines, its budget in pyproject.toml is {budget:,}: "
                "delete some, or raise it in a decision (docs/decisions)"
            )
    print(f"{'all':24} {sum(counted.values()):6,} of {sum(budgets.values()):6,} code lines")
    flaky = open_flaky((ROOT / "tests" / "flaky.md").read_text(encoding="utf-8"))
    print(f"{'flaky tests':24} {len(flaky):6,} of {MOST_FLAKY:6,}")
    if len(flaky) > MOST_FLAKY:
        refusals.append(
            f"tests/flaky.md has {len(flaky)} open lines, {MOST_FLAKY} are allowed: mend one first"
        )
    print(*refusals, sep="\n", end="\n" if refusals else "", file=sys.stderr)
    return bool(refusals)


def count_package(package: str, budgets: dict[str, int]) -> int:
    """Code lines of a package, without those of packages within it that have a budget of their own."""
    within = [ROOT / name for name in budgets if name.startswith(f"{package}/")]
    files = (ROOT / package).rglob("*.py")
    return sum(
        count_code_lines(f.read_text(encoding="utf-8"))
        for f in files
        if not any(w in f.parents for w in within)
    )


def count_code_lines(source: str) -> int:
    """Lines that hold code: no blanks, comments or docstrings (a string that is a statement of its own)."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def open_flaky(page: str) -> list[str]:
    """Rows of the page's table whose last column is empty."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| 2")]
    return [row[1].strip() for row in rows if not row[3].strip()]


if __name__ == "__main__":
    sys.exit(main())
