"""Runs the tests of a module against wrong edits of it, each in a process of its own.

Tools such as mutmut and cosmic-ray make thousands of edits blindly and start pytest anew for each: with torch
to import that is days on two cores, and most surviving edits are no mistakes. Ours are chosen by hand,
mistakes that would train on a wrong signal without an error: they take minutes, and every survivor shows a
missing test.

One process imports the slow libraries that no edit touches, and forks for each edit. A fork works in a copy
of the sources; the working tree is never touched.
"""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, NoReturn

import pytest
from hypothesis import Phase, settings

from tests.bench.properties import examples
from tests.mutations.modules import Modules, find_in
from tests.mutations.patterns import PatternError, read_pattern, replace

COPIED = ("configs", "flows", "seamlessflow", "sf_core", "storage", "tasks", "tests", "pyproject.toml")

OWN = ("flows", "seamlessflow", "sf_core", "storage", "tasks", "tests")
"""Packages that a fork must find in its copy."""

TABLE = "tests/mutations/table.toml"

BROKEN = 9
"""Exit status of a fork in which no test reached a verdict."""

Verdict = Literal["caught", "hung", "SURVIVED", "BROKEN"]


class TableError(ValueError):
    """The table does not fit the sources, or its tests do not pass on them; one sentence."""


@dataclass(frozen=True, slots=True)
class Mutation:
    function: str
    """Qualified name of the function, class or constant that is edited."""
    wrong: str
    """What the edit breaks, in words."""
    old: str
    """Pattern of the place that is edited (tests/mutations/patterns.py)."""
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: files of tests, or single ones, of which one must fail."""

    def applied(self, modules: Modules) -> Edit:
        """Raises TableError if the edit does not apply to exactly one place."""
        try:
            return self._applied(modules)
        except PatternError as error:
            raise TableError(f"{self.function}: {self.wrong}: {error}; mend this entry of {TABLE}") from None

    def _applied(self, modules: Modules) -> Edit:
        old = read_pattern(self.old)
        new = read_pattern(self.new)
        files = modules.files_of(self.function)
        if not files:
            raise PatternError("no module defines it")
        found = [file for file in files for _ in find_in(modules.parse(file), self.function, old)]
        if len(found) != 1:
            where = ", ".join(dict.fromkeys(found or files))
            if not found:
                raise PatternError(
                    f"its old text matches nothing in {where}: a name in it may have changed, or this is a "
                    "namesake of the function"
                )
            raise PatternError(f"its old text is to match once, and matches {len(found)} times in {where}")
        [file] = found
        tree = modules.parse_anew(file)
        [match] = find_in(tree, self.function, old)
        replace(match, new, tree)
        try:
            compile(tree, file, "exec")
        except SyntaxError as error:
            raise PatternError(f"its new text is no Python there: {error.msg}") from None
        return Edit(file, tree)


@dataclass(frozen=True, slots=True)
class Edit:
    file: str
    tree: ast.Module
    """The module with the edit."""


@dataclass(frozen=True, slots=True)
class Result:
    verdict: Verdict
    seconds: float
    output: str
    """The end of pytest's output."""


@dataclass(slots=True)
class _Fork:
    process: int
    copy: Path
    began: float
    mutation: Mutation | None
    edited: str | None
    """The file that the mutation edits."""
    tests: tuple[str, ...]


def read_table(path: Path) -> list[Mutation]:
    return [
        Mutation(
            edit["function"],
            edit["wrong"],
            edit["old"],
            edit["new"],
            tuple(edit.get("tests", group["tests"])),
        )
        for group in tomllib.loads(path.read_text(encoding="utf-8"))["group"]
        for edit in group["edit"]
    ]


def preload(modules: Iterable[str]) -> None:
    """Import the modules that every fork needs, and pytest's plugins. None of them may start a thread."""
    for name in modules:
        importlib.import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()


class Runner:
    """Forks for the sources at `root`, at most `num_workers` at once, each with a copy of its own in `folder`
    and for at most `deadline_s`."""

    def __init__(self, root: Path, folder: Path, num_workers: int, deadline_s: float) -> None:
        # as they are now, whatever somebody edits meanwhile
        self._sources = folder / "sources"
        self._deadline_s = deadline_s
        self._sources.mkdir(parents=True)
        for name in COPIED:
            if (source := root / name).is_dir():
                shutil.copytree(source, self._sources / name)
            elif source.exists():
                shutil.copy2(source, self._sources / name)
        self._modules = Modules(self._sources)
        self._idle = [folder / f"copy-{worker}" for worker in range(num_workers)]
        for copy in self._idle:
            shutil.copytree(self._sources, copy)

    def check(self, mutations: Sequence[Mutation]) -> None:
        """Raises TableError if the table does not fit the sources, or if tests fail on unedited sources: then
        every mutation would seem to be caught."""
        for mutation in mutations:
            mutation.applied(self._modules)
        for fork, result in self._run([(None, tests) for tests in dict.fromkeys(m.tests for m in mutations)]):
            if result.verdict != "SURVIVED":
                raise TableError(f"{' '.join(fork.tests)}: {result.verdict} as it is:\n{result.output}")

    def run(self, mutations: Sequence[Mutation]) -> Iterator[tuple[Mutation, Result]]:
        """Yield each verdict as soon as it is known."""
        for fork, result in self._run([(mutation, mutation.tests) for mutation in mutations]):
            assert fork.mutation is not None
            yield fork.mutation, result

    def _run(
        self, wanted: Sequence[tuple[Mutation | None, tuple[str, ...]]]
    ) -> Iterator[tuple[_Fork, Result]]:
        waiting = list(wanted)[::-1]
        running = list[_Fork]()
        try:
            while waiting or running:
                while waiting and self._idle:
                    running.append(self._begin(*waiting.pop()))
                time.sleep(0.02)
                for fork in list(running):
                    if (result := self._judge(fork)) is not None:
                        running.remove(fork)
                        self._end(fork)
                        yield fork, result
        finally:
            for fork in running:
                os.kill(fork.process, signal.SIGKILL)
                self._end(fork)

    def _begin(self, mutation: Mutation | None, tests: tuple[str, ...]) -> _Fork:
        copy = self._idle.pop()
        edited = None
        if mutation is not None:
            edit = mutation.applied(self._modules)
            edited = edit.file
            (copy / edited).write_text(ast.unparse(edit.tree), encoding="utf-8")
        (copy / "output").write_text("", encoding="utf-8")
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            _be_the_fork(copy, tests)
        return _Fork(process, copy, time.monotonic(), mutation, edited, tests)

    def _judge(self, fork: _Fork) -> Result | None:
        """Verdict of a fork; None while it runs."""
        ended, status = os.waitpid(fork.process, os.WNOHANG)
        seconds = time.monotonic() - fork.began
        if not ended and seconds < self._deadline_s:
            return None
        if not ended:
            os.kill(fork.process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(status) if ended else None
        verdicts: dict[int | None, Verdict] = {None: "hung", 0: "SURVIVED", 1: "caught"}
        output = (fork.copy / "output").read_text(errors="replace", encoding="utf-8")[-4000:]
        return Result(verdicts.get(code, "BROKEN"), seconds, output)

    def _end(self, fork: _Fork) -> None:
        """End a fork and all that it has started; its copy equals the sources again."""
        with suppress(ProcessLookupError):
            os.killpg(fork.process, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(fork.process, 0)
        if fork.edited is not None:
            # with its time of change, by which Python knows that what it has compiled still holds
            shutil.copy2(self._sources / fork.edited, fork.copy / fork.edited)
        self._idle.append(fork.copy)


class _Judge:
    """Pytest plugin that distinguishes failed tests from tests that could not begin."""

    num_failed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.num_failed += report.failed


def _be_the_fork(copy: Path, tests: tuple[str, ...]) -> NoReturn:
    """Run the tests in the forked process, whose end cleans up after them."""
    status = BROKEN
    try:
        os.setsid()
        output = os.open(copy / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # whoever runs the runner may have put others in their place
        sys.stdout = sys.stderr = os.fdopen(output, "w", encoding="utf-8")
        os.chdir(copy)
        # processes that tests start find the copy too
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(copy))
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
            del sys.modules[name]
        # the examples of `make test` (tests/bench/properties.py), of which the first that fails is enough
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile(
            "first", deadline=None, derandomize=True, max_examples=examples(100), phases=phases
        )
        options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "--hypothesis-profile=first"]
        judge = _Judge()
        status = pytest.main([*options, f"--basetemp={copy}.tmp", *tests], plugins=[judge])
        if status != 0:
            status = 1 if judge.num_failed else BROKEN
        sys.stdout.flush()
    finally:
        os._exit(status)
