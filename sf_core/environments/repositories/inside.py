"""Runs named tests and says on standard output which have passed. It runs inside the sandbox, in one process
with the code under test: what it says begins with a word that only it and the worker know."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

import pytest

MAX_WHY = 2000
MOST_WHYS = 20
"""Characters of a reason why a test failed, and how many are given."""


class Reporter:
    def __init__(self, word: str, tests: set[str] | None, only_collects: bool, out: TextIO) -> None:
        """`tests`: ids of those to run; None: all. `only_collects`: none runs, and those that are there are
        told as failed."""
        self._word = word
        self._tests = tests
        self._only_collects = only_collects
        self._out = out
        self._expected: set[str] = set()
        self._passed: set[str] = set()
        self._whys: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._tests is not None:
            items[:] = [item for item in items if item.nodeid in self._tests]
        # known before the code under test runs, which might call pytest.xfail
        self._expected = {item.nodeid for item in items if item.get_closest_marker("xfail")}
        for item in items if self._only_collects else ():
            self._report(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = report.nodeid
        is_expected = hasattr(report, "wasxfail") and test in self._expected
        if report.when == "call" and (report.passed or is_expected):
            self._passed.add(test)
        if report.failed:
            self._passed.discard(test)
            if len(self._whys) < MOST_WHYS:
                self._whys.setdefault(test, report.longreprtext[:MAX_WHY])
        if report.when == "teardown":
            self._report(test)

    def _report(self, test: str) -> None:
        facts = {"test": test, "passed": test in self._passed, "why": self._whys.get(test, "")}
        self._out.write(f"{self._word} {json.dumps(facts)}\n")
        self._out.flush()


def main() -> None:
    request = json.load(sys.stdin)
    out = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115, to the end
    os.dup2(2, 1)
    folder = os.getcwd()
    # only now, so that no file of the repository stands in for one of pytest
    sys.path[:0] = [folder, os.path.join(folder, "src")]
    options = ["-q", "--no-header", "--tb=short", "--continue-on-collection-errors"]
    options += [f"--rootdir={folder}", "-p", "no:cacheprovider", f"--maxfail={request['max_failing']}"]
    if request["only_collects"]:
        options.append("--collect-only")
    tests = None if request["tests"] is None else set(request["tests"])
    reporter = Reporter(request["word"], tests, request["only_collects"], out)
    pytest.main([*options, *request["files"]], [reporter])


if __name__ == "__main__":
    main()
