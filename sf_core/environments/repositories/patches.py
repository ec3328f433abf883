"""Patches as models write them: they are applied as SWE-bench's evaluation applies them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from posixpath import normpath

from sf_core.agents.sandbox import Sandbox

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
