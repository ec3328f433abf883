"""An agent that is a command: a process for each session, in a folder and a process group of its own, or in a
sandbox.

The keeper (sf_core/process/child_processes.py) ends all that the command has started and removes its folder,
also when this process is killed; nothing of a sandbox survives it either.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from sf_core.agents.command_output import CommandOutput, Ear, NoAnswerError, answer_in, files_in
from sf_core.agents.folders import is_name_below, open_folder
from sf_core.agents.sandbox import SandboxError, open_sandbox, why_no_sandbox
from sf_core.config.programs import Command
from sf_core.config.rollout_config import Cause
from sf_core.process.child_processes import await_keeper, start_kept
from sf_core.process.environment_variables import select_inherited
from sf_core.settings import quote
from sf_core.types import Endpoint, Task
from storage.scratch import scratch_folder

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""Time from SIGTERM to SIGKILL for what a command has started."""

END_S = 10.0
"""Longest wait for the keeper beyond that, and for pipes that somebody still holds."""

MODEL_VARIABLES = (
    "OPENAI_MODEL",
    "OPENAI_DEFAULT_MODEL",
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")),
    "GEMINI_MODEL",
)
"""Variables with the names of models that agents read, Claude Code most of them."""

TASK_FILE = "task.json"

_USERS = re.compile(r"(OPENAI|ANTHROPIC|GOOGLE|GEMINI|XDG)_.*")
"""Names of variables that lead to endpoints and files of the user of the worker."""


class CommandError(Exception):
    """A command gave no answer; the message is one sentence, with what it wrote last."""

    def __init__(self, sentence: str, output: str, cause: Cause) -> None:
        super().__init__(sentence)
        self.output = output
        self.cause = cause


@dataclass(frozen=True, slots=True)
class CommandEnd:
    answer: Any
    output: str
    """What it wrote, on standard output and standard error, as it came."""


class CommandAgent:
    """A command as agent, by its `run`. Raises ValueError with one sentence if there is no such program or no
    sandbox on this host."""

    def __init__(self, command: Command, grace_s: float = GRACE_S) -> None:
        self._command = command
        self._grace_s = grace_s
        program = shutil.which(command.command[0], path=command.variables.get("PATH"))
        if program is None:
            raise ValueError(
                f"the program {quote(command.command[0])} does not exist on this host, or cannot be executed"
            )
        if command.sandbox is not None and (reason := why_no_sandbox(command.sandbox.image)):
            raise ValueError(f"sandbox: {reason}")
        self._words = [os.path.abspath(program), *command.command[1:]]

    async def run(
        self, task: Task, endpoint: Endpoint, prepared: Mapping[str, str | bytes] | None = None
    ) -> CommandEnd:
        """Run the command on a task, in a folder with the prepared files. However the call ends, it leaves no
        process and no folder. Raises CommandError if there is no answer."""
        files = _files(prepared)
        written = CommandOutput()
        run = self._run_kept if self._command.sandbox is None else self._run_inside
        try:
            answer = await run(task, endpoint, files | {TASK_FILE: _describe_task(task)}, written)
            if self._command.answer == "output":
                answer = written.answer()
            return CommandEnd(answer, written.all.text())
        except (NoAnswerError, SandboxError) as error:
            raise _failure(f"gave no answer: {error}", "agent", written) from None
        except TimeoutError:
            reason = f"ran longer than its timeout_s of {self._command.timeout_s:g} s"
            raise _failure(reason, "time", written) from None

    async def _run_kept(
        self, task: Task, endpoint: Endpoint, files: dict[str, bytes], written: CommandOutput
    ) -> Any:
        folder = scratch_folder()
        try:
            work, home, temporary = (Path(folder.name, name) for name in ("work", "home", "tmp"))
            for inner in (work, home, temporary):
                inner.mkdir()
            await asyncio.to_thread(_write, work, files)
            folders = {"HOME": str(home), "TMPDIR": str(temporary), "PWD": str(work)}
            process = _KeptProcess(
                self._words,
                folder.name,
                self._grace_s,
                cwd=str(work),
                prompt=task.prompt,
                env=_inherit_variables() | _variables(endpoint) | folders | self._command.variables,
            )
            try:
                await process.start(written)
                async with asyncio.timeout(self._command.timeout_s):
                    status = await process.status()
                # while the folder is there
                number = open_folder(work)
                try:
                    return self._answer_in(number, files, status)
                finally:
                    os.close(number)
            finally:
                await process.end()
        finally:
            # the keeper has removed it, unless it was killed
            folder.cleanup()

    async def _run_inside(
        self, task: Task, endpoint: Endpoint, files: dict[str, bytes], written: CommandOutput
    ) -> Any:
        limits = self._command.sandbox
        assert limits is not None
        async with open_sandbox(limits, files, endpoint, self._words[:1]) as box:
            assert box.endpoint is not None
            ended = await box.run(
                self._words,
                stdin=task.prompt,
                timeout_s=self._command.timeout_s,
                env=_variables(box.endpoint) | self._command.variables,
                written=written,
            )
            match ended.ended_by:
                case "time":
                    raise TimeoutError
                case "output":
                    raise NoAnswerError(f"the output of the command exceeds output_mb ({limits.output_mb})")
                case "memory":
                    raise NoAnswerError(
                        f"the memory use of the command exceeds memory_mb ({limits.memory_mb})"
                    )
            return self._answer_in(box.folder, files, ended.status)

    def _answer_in(self, folder: int, files: dict[str, bytes], status: int) -> Any:
        """The answer, unless it is what the command prints."""
        if status != 0:
            raise NoAnswerError(_in_words(status))
        try:
            match self._command.answer:
                case "output":
                    return None
                case "folder":
                    return files_in(folder, files)
                case file:
                    return answer_in(folder, file.removeprefix("file:"))
        except NoAnswerError as error:
            raise NoAnswerError(f"the command exited with status 0, but {error}") from None


class _KeptProcess:
    """A command and its keeper."""

    def __init__(
        self, words: list[str], folder: str, grace_s: float, *, cwd: str, prompt: str, env: dict[str, str]
    ) -> None:
        self._end_s = grace_s + END_S
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(prompt.encode(errors="backslashreplace"))
            file.seek(0)
            self._channel, self._keeper = start_kept(
                words,
                grace_s=grace_s,
                folder=folder,
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=cwd,
                env=env,
            )
        self._writer: asyncio.StreamWriter | None = None
        self._ears: list[Ear] = []

    async def start(self, written: CommandOutput) -> None:
        """Return when the command runs; what it writes is heard from now on. Raises NoAnswerError if it
        cannot run."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._channel)
        loop = asyncio.get_running_loop()
        pipes = (self._keeper.stdout, written.on_output), (self._keeper.stderr, written.on_error)
        for pipe, on_data in pipes:
            _, ear = await loop.connect_read_pipe(partial(Ear, on_data), pipe)
            self._ears.append(ear)
        if (error := (await self._read_facts())["error"]) is not None:
            raise NoAnswerError(f"the agent's command cannot be started: {error}")

    async def status(self) -> int:
        """Its exit status, or minus the signal that killed it, once all that it started has ended."""
        return int((await self._read_facts())["status"])

    async def end(self) -> None:
        """Return when all that the command started has ended and its folder is removed."""
        if self._writer is None:
            return self._channel.close()
        self._writer.write_eof()
        try:
            async with asyncio.timeout(self._end_s):
                while await self._reader.read(4096):
                    pass
                await_keeper(self._keeper)
                for ear in self._ears:
                    await ear.has_ended.wait()
        except TimeoutError:
            log.warning("processes of an ended command still run after %g s", self._end_s)
        finally:
            self._writer.close()
            for ear in self._ears:
                ear.close()

    async def _read_facts(self) -> dict[str, Any]:
        line = await self._reader.readline()
        if not line:
            raise NoAnswerError("the process that supervises the agent's command was killed")
        facts: dict[str, Any] = json.loads(line)
        return facts


def _failure(reason: str, cause: Cause, written: CommandOutput) -> CommandError:
    lines = written.last_lines()
    ended = f"; the command's standard error ends with: {lines}" if lines else ""
    return CommandError(f"the command {reason}{ended}", written.all.text(), cause)


def _inherit_variables() -> dict[str, str]:
    return {name: value for name, value in select_inherited().items() if not _USERS.fullmatch(name)}


def _variables(endpoint: Endpoint) -> dict[str, str]:
    """The variables in which SDKs look for the endpoint."""
    # some SDKs append /v1 themselves
    above = endpoint.base_url.removesuffix("/v1")
    own = {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_BASE": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": above,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "GOOGLE_GEMINI_BASE_URL": above,
        "GEMINI_API_KEY": endpoint.api_key,
    }
    return own | dict.fromkeys(MODEL_VARIABLES, endpoint.model)


def _files(prepared: Mapping[str, str | bytes] | None) -> dict[str, bytes]:
    expected = (
        "environment.prepare must return a mapping from names of files in the command's folder to "
        "texts or bytes"
    )
    if not isinstance(prepared or {}, Mapping):
        raise TypeError(f"{expected}, not {type(prepared).__name__}")
    files: dict[str, bytes] = {}
    for name, content in (prepared or {}).items():
        if not is_name_below(name):
            raise ValueError(f"{expected}: {quote(name)} is not the name of a file in this folder")
        files[name] = content.encode() if isinstance(content, str) else bytes(content)
    return files


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _describe_task(task: Task) -> bytes:
    """What the command may know of the task: all but the answer, which would give the solution away."""
    facts = {name: getattr(task, name) for name in ("task_id", "environment", "prompt", "metadata")}
    try:
        return orjson.dumps(facts, option=orjson.OPT_INDENT_2)
    except TypeError as error:
        raise NoAnswerError(f"the task cannot be written as JSON ({error})") from None


def _in_words(status: int) -> str:
    return (
        f"the command exited with status {status}"
        if status > 0
        else f"the command was killed by signal {-status}"
    )
