"""What a change of a repository is worth: hidden tests, run in a sandbox that the agent has never seen."""

from __future__ import annotations

import glob
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from sf_core.agents.command_output import CommandOutput, NoAnswerError
from sf_core.agents.folders import is_name_below
from sf_core.agents.sandbox import Ended, Sandbox, SandboxError
from sf_core.environments.repositories.dataset import Instance, paths_in
from sf_core.environments.repositories.workspace import APPLY_S, STRICT, apply_patch, cut, fits

INSIDE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")

STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc"),
    *("*.egg-info/*", "*.dist-info/*", ".git", ".git/*"),
)
"""Files that say how tests run, or how a patch is applied, wherever they are. Only the data set's count."""

# plugins would be those of the worker's Python
VARIABLES = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}


REMOVE = """
import json, os, re, sys
is_one = re.compile(json.load(sys.stdin)).match
for folder, folders, files in os.walk("."):
    for name in (*folders, *files):
        path = os.path.relpath(os.path.join(folder, name))
        if os.path.islink(path) or name in files and is_one(path):
            os.unlink(path)
"""
"""Removes links, which could lead to other files in place of the data set's, and files of certain names."""


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    passed: bool
    why: str
    """What pytest tells of a test that failed."""


NOT_RUN = CaseOutcome(False, "the test does not exist, was skipped, or pytest ended before it")


async def find_failing_tests(
    box: Sandbox, instance: Instance, base: Mapping[str, bytes], answer: Any, timeout_s: float
) -> dict[str, str]:
    """Named tests that do not pass when the answer and then the hidden tests are put over the base, which is
    in the sandbox, and why. The answer is a patch, or a mapping of changed files to their texts."""
    if misfit := await _put(box, instance, base, answer):
        patch = "the answer" if misfit == "patch" else "with the answer applied, the test_patch"
        return dict.fromkeys(instance.tests, f"{patch} does not apply")
    outcomes = await run_tests(box, instance.test_files, timeout_s, instance.tests)
    return {
        test: outcome.why for test in instance.tests if not (outcome := outcomes.get(test, NOT_RUN)).passed
    }


async def fault_of_row(
    box: Sandbox, instance: Instance, base: Mapping[str, bytes], timeout_s: float
) -> str | None:
    """Why no answer can earn everything, whatever the tests say: its patches do not fit the base, which is in
    the sandbox, or with them pytest finds no such tests. None: nothing. Raises SandboxError if that cannot be
    told."""
    if misfit := await _put(box, instance, base, instance.patch):
        return f"the {misfit} does not apply to base_commit"
    ended, written, reports = await _run_pytest(
        box, instance.test_files, timeout_s, instance.tests, only_collects=True
    )
    if ended.ended_by != "exit":
        raise SandboxError(
            f"pytest used too much {ended.ended_by} while it collected tests with the patch applied"
        )
    run_tests = {facts["test"] for facts in reports}
    missing = [test for test in instance.tests if test not in run_tests]
    if not missing:
        return None
    more = f", nor {len(missing) - 1} more" if len(missing) > 1 else ""
    lines = [line for line in written.last_lines().splitlines() if line.startswith(("E  ", "ERROR:"))]
    why = f" ({lines[-1].removeprefix('E  ').strip()})" if lines else ""
    return f"with the patch applied, pytest finds no {missing[0]}{more}{why}"


async def _put(
    box: Sandbox, instance: Instance, base: Mapping[str, bytes], answer: Any
) -> Literal["patch", "test_patch"] | None:
    """Put an answer and the hidden tests over the base. Returns what does not fit."""
    theirs = re.compile("|".join(map(translate, _data_sets(instance))))
    if isinstance(answer, Mapping):
        await box.write(dict(_files(answer)))
    elif not isinstance(answer, str) or not await apply_patch(box, cut(answer, theirs), base):
        return "patch"
    await _put_back(box, base, theirs)
    return None if await fits(box, STRICT, instance.test_patch) else "test_patch"


async def _put_back(box: Sandbox, base: Mapping[str, bytes], theirs: re.Pattern[str]) -> None:
    """Whatever has changed the files of these names, leave those of the base, and no links."""
    ended = await box.run_python(REMOVE, stdin=json.dumps(theirs.pattern), timeout_s=APPLY_S)
    if ended.status != 0:
        raise SandboxError(f"files of the data set could not be restored: {ended.output.strip()[-500:]}")
    await box.write({name: content for name, content in base.items() if theirs.match(name)})


async def run_tests(
    box: Sandbox,
    files: Iterable[str],
    timeout_s: float,
    tests: Iterable[str] | None = None,
    max_failing: int = 0,
) -> dict[str, CaseOutcome]:
    """Outcomes of these tests, or of all in the files, as far as they were run to their end. `max_failing`:
    no test is run after so many have failed; 0: all are."""
    _, _, reports = await _run_pytest(box, files, timeout_s, tests, max_failing=max_failing)
    return {facts["test"]: CaseOutcome(facts["passed"], facts["why"]) for facts in reports}


async def _run_pytest(
    box: Sandbox,
    files: Iterable[str],
    timeout_s: float,
    tests: Iterable[str] | None,
    max_failing: int = 0,
    only_collects: bool = False,
) -> tuple[Ended, CommandOutput, list[dict[str, Any]]]:
    """How it ended, what it wrote, and what inside.py has told."""
    word = secrets.token_hex(16)
    job = {
        "word": word,
        "files": list(files),
        "tests": None if tests is None else list(tests),
        "max_failing": max_failing,
        "only_collects": only_collects,
    }
    written = CommandOutput()
    words = ["python3", "-s", "-P", "-c", INSIDE]
    ended = await box.run(words, stdin=json.dumps(job), timeout_s=timeout_s, env=VARIABLES, written=written)
    try:
        # what follows the last newline was cut off
        lines = written.answer().split("\n")[:-1]
    except NoAnswerError:
        # the code under test has found a way to write there
        lines = []
    reports = [json.loads(line.removeprefix(word)) for line in lines if line.startswith(word)]
    return ended, written, reports


def _data_sets(instance: Instance) -> Iterator[str]:
    """Patterns of names that the data set decides and no agent: what says how tests run, their files, and
    what is beside them, unless the right repair is there."""
    for pattern in STEERING:
        yield from (pattern, f"*/{pattern}")
    repaired = paths_in(instance.patch)
    for name in {*instance.test_files, *paths_in(instance.test_patch)} - repaired:
        yield glob.escape(name)
        folder = str(PurePosixPath(name).parent)
        if folder != "." and not any(path.startswith(f"{folder}/") for path in repaired):
            yield f"{glob.escape(folder)}/*"


def _files(answer: Mapping[Any, Any]) -> Iterator[tuple[str, bytes]]:
    for name, text in answer.items():
        path = str(PurePosixPath(name))
        if isinstance(text, str) and is_name_below(path):
            yield path, text.encode()
