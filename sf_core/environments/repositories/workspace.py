"""The work folder of a sandbox as a git repository: what an agent does in it, and what it has changed.
Patches that models write are applied as SWE-bench's evaluation applies them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from posixpath import normpath
from sysconfig import get_path

from sf_core.agents.command_output import CommandOutput, Transcript
from sf_core.agents.sandbox import Sandbox, SandboxError
from sf_core.config.programs import SandboxLimits

log = logging.getLogger(__name__)

APPLY_S = 120.0

STRICT = "git apply --verbose"
ATTEMPTS = (STRICT, "git apply --verbose --reject", "patch --batch --fuzz=5 -p1 --no-backup-if-mismatch -i -")
"""GIT_APPLY_CMDS of swebench/harness/run_evaluation.py, in its order. Copies that `patch` would leave beside
files are not made, because the harness puts them back: what did not match exactly would be undone."""

CANNOT_BE_STARTED = 127

# files that a patch makes cannot stand in for a repository of git, whose settings would count
VARIABLES = {"GIT_DIR": "/dev/null"}

_PART = re.compile(r"^(?=diff --git |--- .*\n\+\+\+ .*\n@@ )", re.MULTILINE)
_FACT = re.compile(r"^(rename to|copy to|\+\+\+|---) (?!/dev/null)([^\n]+)", re.MULTILINE)
_HEADER = re.compile(r"^diff --git ([^\n\r]+)", re.MULTILINE)
_QUOTED = re.compile(r'"((?:\\.|[^"\\])*)"')


async def apply_patch(box: Sandbox, patch: str, base: Mapping[str, bytes]) -> bool:
    """Whether a patch fits and is applied to the base, which is all that is in the sandbox. If it is not, the
    sandbox is of no further use."""
    for attempt in ATTEMPTS:
        if await fits(box, attempt, patch):
            return True
        if attempt != STRICT:
            await box.run(["find", ".", "-mindepth", "1", "-delete"], timeout_s=APPLY_S)
            await box.write(base)
    return False


async def fits(box: Sandbox, attempt: str, patch: str) -> bool:
    """Whether a patch fits and is applied by this attempt; an empty one does."""
    if not patch.strip():
        return True
    words = ["sh", "-c", f"exec {attempt}"]
    # models forget it, git then calls the patch corrupt, and GNU patch takes it only after context
    patch = patch.removesuffix("\n") + "\n"
    ended = await box.run(words, stdin=patch, timeout_s=APPLY_S, env=VARIABLES)
    if ended.status == CANNOT_BE_STARTED:
        _tell_missing(attempt.partition(" ")[0])
    return ended.status == 0


def cut(patch: str, protected: re.Pattern[str]) -> str:
    """The patch without its parts that change files of such names; nothing if nothing is left to apply. GNU
    patch cannot leave files out, and a part that does not fit would spoil the others. A patch may be made to
    deceive this, so it protects no file."""
    parts = [(part, _find_changed(part)) for part in _PART.split(patch)]
    allowed = [(part, file) for part, file in parts if file is None or not protected.match(file)]
    changes_nothing = not any(file for _, file in allowed)
    if len(allowed) < len(parts) and changes_nothing:
        return ""
    return "".join(part for part, _ in allowed)


def _find_changed(part: str) -> str | None:
    """The file that is changed by a part of a patch, or None if it does not say."""
    header = part.partition("\n@@ ")[0]
    facts = {line: _unquote(name) for line, name in _FACT.findall(header)}
    for line in ("rename to", "copy to"):
        if name := facts.get(line):
            return normpath(name)
    for line in ("+++", "---"):
        if name := facts.get(line):
            _, slash, below = name.partition("/")
            return normpath(below.lstrip("/") if slash else name)
    match = _HEADER.search(header)
    return None if match is None else _name_of_both(match[1])


def _name_of_both(names: str) -> str | None:
    """The name that a header has twice, first behind a/ and then behind b/; None if it has two names."""
    # the name may have spaces
    half = len(names) // 2
    before = _unquote(names[:half]).partition("/")[2]
    after = _unquote(names[half + 1 :]).partition("/")[2]
    return normpath(before) if before == after else None


def _unquote(name: str) -> str:
    """A name as git writes it, with what follows it, as dates do."""
    if quoted := _QUOTED.match(name):
        escaped = quoted[1].encode(errors="backslashreplace").decode("unicode_escape", "replace")
        return escaped.encode("latin-1", "replace").decode(errors="surrogateescape")
    return name.partition("\t")[0].rstrip("\r")


@cache
def _tell_missing(program: str) -> None:
    log.warning(
        "`%s` is missing in the sandbox (Debian has a package of this name), so patches that need it get "
        "no reward",
        program,
    )


MAX_SHOWN = 16_000
"""Most bytes of a command's output that the agent is shown, half of them its beginning and half its end."""

GIT_S = 120.0

PYTEST_NEEDS = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")

# the agent's own leavings, which are no part of a patch
BEGIN = r"""
git init -q && printf '__pycache__/\n*.pyc\n.pytest_cache/\n' >> .git/info/exclude && git add -A -f &&
git -c user.name=base -c user.email=base@localhost commit -q --allow-empty -m base && git rev-parse HEAD
"""

CHANGES = """
git add -A && git diff --cached --binary --no-renames --no-ext-diff --no-textconv --no-color \
    --src-prefix=a/ --dst-prefix=b/ "$1"
"""


def hide_originals(limits: SandboxLimits, names: Iterable[str]) -> SandboxLimits:
    """These limits for a sandbox in which the installed packages of the repository's own names are not seen:
    the agent could copy what it is to repair."""
    packages = {name.removeprefix("src/").partition("/")[0] for name in names}
    hidden: set[str] = set()
    for kind in ("purelib", "platlib"):
        site_packages = Path(get_path(kind))
        for package in packages.difference(PYTEST_NEEDS):
            installed = site_packages / package
            if installed.is_dir():
                hidden.add(str(installed))
    return limits.model_copy(update={"hidden": (*limits.hidden, *sorted(hidden))})


async def commit_all(box: Sandbox) -> str:
    """Make a repository of one commit, which has no history that gives a repair away; returns its id."""
    return (await _by_git(box, BEGIN)).strip()


async def changes_of(box: Sandbox, commit: str) -> str:
    """What is different from the commit, as a patch."""
    return await _by_git(box, CHANGES, commit)


async def run_shell(box: Sandbox, command: str, timeout_s: float) -> str:
    """What the command prints and how it ended, for a model to read."""
    ended = await box.run(["bash", "-c", command], timeout_s=timeout_s)
    output = Transcript(MAX_SHOWN)
    output.add(ended.output.encode())
    match ended.ended_by:
        case "exit":
            remark = f"exit status {ended.status}" if ended.status else ""
        case "time":
            remark = f"ended after {timeout_s:g} s"
        case reason:
            remark = f"ended: too much {reason}"
    return "\n".join(filter(None, (output.text().rstrip("\n"), remark)))


async def _by_git(box: Sandbox, script: str, *words: str) -> str:
    written = CommandOutput()
    ended = await box.run(["sh", "-c", script, "sh", *words], timeout_s=GIT_S, written=written)
    if ended.status != 0:
        raise SandboxError(f"git in the sandbox exited with status {ended.status}: {written.last_lines()}")
    return written.answer()
