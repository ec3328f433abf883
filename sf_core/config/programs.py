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
"""Path of the work folder inside the sandbox."""

_OURS = tuple(map(PurePosixPath, (WORK, "/proc", "/dev", "/sys", "/tmp")))


def _can_be_shown(path: str) -> str:
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts or pure == PurePosixPath("/"):
        raise ValueError(f"expected the absolute path of a file or folder, got {quote(path)}")
    if any(pure == ours or pure in ours.parents for ours in _OURS) or pure.is_relative_to(WORK):
        raise ValueError(f"{quote(path)} is used by the sandbox itself; name another folder")
    return path


class SandboxLimits(Settings):
    """Limits of programs in a sandbox. The programs see a read-only system, and no other files of the
    host."""

    memory_mb: int = Field(2048, ge=64)
    """Maximum memory of the sandbox, in MB, summed over all processes. Files that the programs write count
    toward this limit."""
    disk_mb: int = Field(512, ge=1)
    """Maximum size of the work folder, in MB. The same limit applies to /tmp. The files in both folders are
    kept in memory and count toward `memory_mb`."""
    processes: int = Field(128, ge=1)
    """Maximum number of processes and threads at a time."""
    open_files: int = Field(1024, ge=16)
    """Maximum number of open files per process."""
    cpu_s: int = Field(3600, ge=1)
    """Maximum CPU time per process, in seconds."""
    output_mb: int = Field(64, ge=1)
    """Maximum size of the output of one command, in MB, summed over standard output and standard error. A
    command that writes more is killed."""
    image: str | None = Field(None, pattern=r"^[^-\s]\S*$")
    """OCI image whose files the sandbox uses as its system. If set, podman creates the sandbox. The image
    must contain python3, version 3.9 or later. Empty: programs see the system of the host."""
    paths: tuple[Annotated[FilePath, AfterValidator(_can_be_shown)], ...] = Field(())
    """Additional files and folders of the host that programs in the sandbox can read."""
    hidden: tuple[Annotated[FilePath, AfterValidator(_can_be_shown)], ...] = Field(())
    """Folders of the host that appear empty in the sandbox. Has no effect with `image`."""


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
        raise ValueError(
            f"{quote(name)} is not a valid name of an environment variable: use letters, digits and '_'"
        )
    return name


class Command(Settings):
    """A program that works as agent. Each session runs one process in a separate folder. The program reads
    the task from standard input or from task.json. Environment variables contain the address and the key of
    the endpoint. The SDKs of OpenAI, Anthropic and Google read these variables."""

    command: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1), BeforeValidator(_are_words)
    ]
    """The program and its arguments, as a list of words. No shell interprets the words. The agent worker
    searches its PATH for the program. A name with a slash is relative to the current folder of the worker."""
    answer: Annotated[str, AfterValidator(_is_inside)] = Field("output", pattern=r"^(output|folder|file:.+)$")
    """The answer that the reward function receives. output: the text that the program prints. file:NAME: the
    text of the file NAME in the program's folder. folder: a mapping from the name to the text of each file in
    the program's folder."""
    timeout_s: float = Field(3600.0, gt=0)
    """Timeout of the program, in seconds. When it expires, `rollout.on_failure.timeout` applies. Time without
    a serving engine counts toward this timeout. The timeout `rollout.session_timeout_s` applies in addition,
    and does not count such time."""
    variables: dict[Annotated[str, AfterValidator(_is_variable)], str] = Field({})
    """Additional environment variables of the program. The variables are stored with the run, so do not put
    secrets here."""
    sandbox: SandboxLimits | None = None
    """Limits of the sandbox in which the program runs. {}: a sandbox with the default limits. Empty: no
    sandbox, so the program has all rights of the worker."""


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
