"""Settings of programs that are run: the sandbox (sf_core/agents/sandbox), and a command as agent
(sf_core/agents/command.py)."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from sf_core.config.addresses import FilePath
from sf_core.settings import Reference, Settings, quote

WORK = "/sandbox"
"""The work folder, as it is called inside."""

_OURS = tuple(map(PurePosixPath, (WORK, "/proc", "/dev", "/sys", "/tmp")))


def _can_be_shown(path: str) -> str:
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts or pure == PurePosixPath("/"):
        raise ValueError(f"expected the absolute path of a file or folder, got {quote(path)}")
    if any(pure == ours or pure in ours.parents for ours in _OURS) or pure.is_relative_to(WORK):
        raise ValueError(f"{quote(path)} is a place of the sandbox's own; name another folder")
    return path


class SandboxLimits(Settings):
    """What programs in a sandbox may use. They see a read-only system, and of the host nothing else."""

    memory_mb: int = Field(2048, ge=64)
    """Memory of all processes together, with the files that they write."""
    disk_mb: int = Field(512, ge=1)
    """Size of the work folder, and of /tmp. Files are in memory and count there too."""
    processes: int = Field(128, ge=1)
    """Processes and threads at once."""
    open_files: int = Field(1024, ge=16)
    """Open files of each process."""
    cpu_s: int = Field(3600, ge=1)
    """Seconds on a CPU of each process."""
    output_mb: int = Field(64, ge=1)
    """What a command may write on standard output and standard error; beyond it, it is ended."""
    image: str | None = Field(None, pattern=r"^[^-\s]\S*$")
    """An OCI image whose system is seen in place of the host's: podman makes the sandbox then. It needs a
    python3, of version 3.9 or later."""
    paths: tuple[Annotated[FilePath, AfterValidator(_can_be_shown)], ...] = Field(())
    """Files and folders of the host that are seen inside too, read-only, beside the system and the worker's
    Python."""
    hidden: tuple[Annotated[FilePath, AfterValidator(_can_be_shown)], ...] = Field(())
    """Folders that would be seen inside, and are empty there. With an image nothing is hidden."""


def _are_words(command: Any) -> Any:
    if isinstance(command, str):
        raise ValueError(f"expected a list of words such as [claude, -p], got {quote(command)}")
    return command


def _is_inside(answer: str) -> str:
    name = PurePosixPath(answer.removeprefix("file:"))
    if name.is_absolute() or ".." in name.parts or not name.parts:
        raise ValueError(f"expected a file in the command's folder, got {quote(answer)}")
    return answer


def _is_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{quote(name)} is no name of a variable: use letters, digits and '_'")
    return name


class Command(Settings):
    """A program as agent: a process for each session, in a folder of its own. It reads the task on standard
    input or in task.json, and finds the endpoint in the variables that the SDKs of OpenAI, Anthropic and
    Google read."""

    command: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1), BeforeValidator(_are_words)
    ]
    """The program and its arguments, word by word; no shell reads them. The program is looked up on the PATH
    of the agent worker; with a slash, from the folder in which the worker runs."""
    answer: Annotated[str, AfterValidator(_is_inside)] = Field("output", pattern=r"^(output|folder|file:.+)$")
    """What the reward function gets. output: what it prints. file:NAME: the text of this file in its folder.
    folder: the files that it leaves in its folder, as a mapping of names to texts."""
    timeout_s: float = Field(3600.0, gt=0)
    """Longest time that it runs, pauses counted; beyond it `rollout.on_failure.timeout` applies, as it does
    beyond `rollout.session_timeout_s`."""
    variables: dict[Annotated[str, AfterValidator(_is_variable)], str] = Field({})
    """Further environment variables. They are stored with the run, so they are no place for keys."""
    sandbox: SandboxLimits | None = None
    """Limits of the sandbox that it runs in; {} has the usual ones. Without a sandbox the command is trusted:
    it runs with the rights of the worker."""


def _form(value: Any) -> str:
    if value is None:
        return "nothing"
    return "command" if isinstance(value, dict | Command) else "function"


AnyAgent = Annotated[
    Annotated[Reference, Tag("function")]
    | Annotated[Command, Tag("command")]
    | Annotated[None, Tag("nothing")],
    Discriminator(_form),
]
