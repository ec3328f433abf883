"""Makes a data set without a network: faults planted in installed libraries that have tests of their own.

python -m examples.repositories.generate FOLDER

Each fault makes some of the library's tests fail and leaves others alone. Its instance is a commit with the
fault and without the tests that fail, which are hidden; it is kept if it is right (check.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from textwrap import dedent
from typing import Any

from examples.repositories.faults import faults_in, without_functions
from examples.repositories.libraries import LIBRARIES, Library
from seamlessflow import SandboxError, SandboxLimits, open_sandbox, why_no_sandbox
from seamlessflow.repositories import (
    AT_ONCE,
    CaseOutcome,
    Repositories,
    fault_of,
    hide_originals,
    run_tests,
)

MAX_FAILING = 8
"""Most tests that a fault may fail: more of them tell little of where it is."""

TRIES = 6
"""Faults tried for each instance that is wanted."""

TESTS_S = 10.0
"""Longest time of a library's tests: a fault may be an endless loop."""

MOST_LINES = 12
"""Lines of a test that a report quotes, up to the one that fails."""

REPORT = """\
{library} does not do what it did before. This, from a program of ours,

```python
{called}
```

now fails:

```
{message}
```
"""


@dataclass(frozen=True, slots=True)
class Planted:
    name: str
    """Name of the source file."""
    files: dict[str, bytes]
    """What differs from the library: the source with its fault, and the tests that remain visible."""
    failing: list[str]
    passing: list[str]
    report: str


async def generate(
    folder: Path, libraries: Sequence[Library] = LIBRARIES, per_library: int = 25, seed: int = 0
) -> Path:
    """Write git repositories and a data set of instances, all of them checked; returns its file. Raises
    SandboxError where there is no sandbox, in which the faults are run."""
    if reason := why_no_sandbox():
        raise SandboxError(reason)
    gate = asyncio.Semaphore(AT_ONCE)
    repositories = folder / "repositories"
    repositories.mkdir(parents=True)

    async def plant(library: Library) -> list[dict[str, Any]]:
        async with gate:
            files = library.files()
            if not files:
                return []
            planted = await _plant(library, files, per_library, Random(f"{seed} {library.repo}"))
            return _commit(repositories, library.repo, files, planted)

    rows = [row for found in await asyncio.gather(*map(plant, libraries)) for row in found]
    dataset = folder / "dataset.jsonl"
    _write(dataset, rows)
    kept = await _checked(dataset, repositories, rows, gate)
    _write(dataset, kept)
    return dataset


async def _plant(library: Library, files: Mapping[str, bytes], most: int, random: Random) -> list[Planted]:
    candidates = [(name, fault) for name in library.source_names() for fault in faults_in(files[name])]
    random.shuffle(candidates)
    planted: list[Planted] = []
    used: set[tuple[str, str]] = set()
    async with open_sandbox(hide_originals(SandboxLimits(), files), files) as box:
        tests = library.test_names()
        runs = [await run_tests(box, tests, TESTS_S) for _ in range(2)]
        stable = {test for test in runs[0] if all(test in run and run[test].passed for run in runs)}
        for name, fault in candidates[: most * TRIES]:
            if len(planted) == most:
                break
            if (name, fault.function) in used:
                continue
            changed = fault.planted_in(files[name])
            await box.write({name: changed})
            outcomes = await run_tests(box, tests, TESTS_S, stable, max_failing=MAX_FAILING + 1)
            await box.write({name: files[name]})
            # else they were not run to the end
            is_whole = outcomes.keys() == stable
            found = _instance(library, files, name, changed, outcomes) if is_whole else None
            if found is not None:
                used.add((name, fault.function))
                planted.append(found)
    return planted


def _instance(
    library: Library,
    files: Mapping[str, bytes],
    name: str,
    changed: bytes,
    outcomes: Mapping[str, CaseOutcome],
) -> Planted | None:
    """None if the fault makes no good instance: nobody notices it, or nothing works any more."""
    failing = sorted(test for test, outcome in outcomes.items() if not outcome.passed)
    passing = sorted(outcomes.keys() - failing)
    if not 1 <= len(failing) <= MAX_FAILING or not passing:
        return None
    hidden = _without(files, failing)
    report = _report(library, files, failing[0], outcomes[failing[0]].why)
    if hidden is None or report is None:
        return None
    return Planted(name, {name: changed, **hidden}, failing, passing, report)


def _without(files: Mapping[str, bytes], tests: list[str]) -> dict[str, bytes] | None:
    """Files with tests, without these."""
    by_file: dict[str, set[str]] = {}
    for test in tests:
        file, _, name = test.partition("[")[0].partition("::")
        by_file.setdefault(file, set()).add(name.replace("::", "."))
    left = {file: without_functions(files[file], names) for file, names in by_file.items()}
    return None if None in left.values() else {file: text for file, text in left.items() if text is not None}


def _report(library: Library, files: Mapping[str, bytes], test: str, why: str) -> str | None:
    """What a user might write, who knows what he called and what came of it, and not where the fault is."""
    message = "\n".join(line[1:].strip() for line in why.splitlines() if line.startswith("E "))
    file = test.partition("::")[0]
    name = re.escape(test.partition("[")[0].rpartition("::")[2])
    reached = re.search(rf"^{re.escape(file)}:(\d+): in {name}$", why, re.MULTILINE)
    if not message or reached is None:
        return None
    source = files[file].decode().splitlines()
    end = int(reached[1])
    start = max(n for n in range(end) if re.match(rf"\s*(async )?def {name}\b", source[n]))
    called = "\n".join(source[start + 1 : end][-MOST_LINES:])
    return REPORT.format(
        library=library.repo.partition("/")[2],
        called=dedent(called),
        # addresses are others each time
        message=re.sub(r"\b0x[0-9a-f]{6,}", "0x...", message),
    )


def _commit(
    repositories: Path, repo: str, files: Mapping[str, bytes], planted: list[Planted]
) -> list[dict[str, Any]]:
    """Make a bare repository with a commit of the library, and one for each fault; returns their rows."""
    folder = repositories / f"{repo.replace('/', '__')}.git"
    _git(folder, "init", "--quiet", "--bare", str(folder))
    stream = [_as_commit("whole", files)]
    for number, one in enumerate(planted):
        # no child of the other, whose difference is the repair
        stream.append(_as_commit(f"instance-{number}", {**files, **one.files}))
    _git(folder, "fast-import", "--quiet", stdin=b"".join(stream))
    rows = []
    for number, one in enumerate(planted):
        base = _git(folder, "rev-parse", f"instance-{number}").strip()
        rows.append(
            {
                "instance_id": f"{repo.replace('/', '__')}-{number}",
                "repo": repo,
                "base_commit": base,
                "problem_statement": one.report,
                "patch": _git(folder, "diff", base, "whole", "--", one.name),
                "test_patch": _git(folder, "diff", base, "whole", "--", *one.files.keys() - {one.name}),
                "FAIL_TO_PASS": json.dumps(one.failing),
                "PASS_TO_PASS": json.dumps(one.passing),
            }
        )
    return rows


def _as_commit(branch: str, files: Mapping[str, bytes]) -> bytes:
    told = b"state of the library\n"
    parts = [
        f"commit refs/heads/{branch}\ncommitter seamlessflow <> 0 +0000\ndata {len(told)}\n".encode() + told,
        b"deleteall\n",
    ]
    for name, content in files.items():
        parts.append(f"M 100644 inline {name}\ndata {len(content)}\n".encode() + content + b"\n")
    return b"".join(parts)


async def _checked(
    dataset: Path, repositories: Path, rows: list[dict[str, Any]], gate: asyncio.Semaphore
) -> list[dict[str, Any]]:
    """The rows that are right."""
    environment = Repositories(dataset=str(dataset), repositories=str(repositories))

    async def is_right(row: dict[str, Any]) -> bool:
        async with gate:
            return await fault_of(environment, row["instance_id"]) is None

    right = await asyncio.gather(*map(is_right, rows))
    return [row for row, is_kept in zip(rows, right, strict=True) if is_kept]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _git(folder: Path, *words: str, stdin: bytes = b"") -> str:
    command = ["git", f"--git-dir={folder}", "-c", "diff.noprefix=false", *words]
    return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout.decode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a data set of faults in installed libraries.")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--per-library", type=int, default=25, metavar="N", help="most instances of each")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    dataset = asyncio.run(generate(given.folder, per_library=given.per_library, seed=given.seed))
    print(f"{len(dataset.read_text(encoding='utf-8').splitlines())} instances in {dataset}")


if __name__ == "__main__":
    main()
