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
    kept = [(part, name) for part, name in parts if name is None or not protected.match(name)]
    is_left = len(kept) == len(parts) or any(name for _, name in kept)
    return "".join(part for part, _ in kept) if is_left else ""


def _find_changed(part: str) -> str | None:
    """The file that is changed by a part of a patch, or None if it does not say."""
    header = part.partition("\n@@ ")[0]
    facts = {what: _unquote(name) for what, name in _FACT.findall(header)}
    for what in ("rename to", "copy to", "+++", "---"):
        if name := facts.get(what):
            # these alone have no a/ or b/ before them
            is_whole = what.endswith("to") or "/" not in name
            return normpath(name if is_whole else name.partition("/")[2].lstrip("/"))
    if found := _HEADER.search(header):
        # the name stands there twice, and may have spaces
        half = len(found[1]) // 2
        names = {_unquote(name).partition("/")[2] for name in (found[1][:half], found[1][half + 1 :])}
        return normpath(names.pop()) if len(names) == 1 else None
    return None


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
