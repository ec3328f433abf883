"""The work folder of a sandbox as a git repository: what an agent does in it, and what it has changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from sysconfig import get_path

from sf_core.agents.command_output import CommandOutput, Transcript
from sf_core.agents.sandbox import Sandbox, SandboxError
from sf_core.config.programs import SandboxLimits

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
