"""The process of a rehearsal: runs one task of a run by its agent and its reward, with a scripted answer.

    python -m sf_core.cli.rehearsal.session CONFIG RESULT

CONFIG is a configuration as JSON. RESULT is the file to which the result is written, as JSON. A process of
its own, because the user's code may hang, leave threads or end the process.

Which errors of a session every other session would have too, whatever the policy answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import walk_tb
from types import BuiltinFunctionType, CoroutineType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import orjson

from sf_core.agents.authorities import read_authorities_lazily
from sf_core.agents.phases import MISSING_RETURN, LateError, Phases, Work, describe_none
from sf_core.agents.runner import as_json, first_index
from sf_core.cli.rehearsal.scripted_policy import ScriptedPolicy
from sf_core.cli.serving.mistakes import NothingAskedError, PhaseError, explain_silence, name_phase
from sf_core.config import RunConfig
from sf_core.environments.registry import agent_of, parts_of, prepare_of, reward_of, tasks_of
from sf_core.process.import_path import import_from, user_folders
from sf_core.process.user_code import is_own, own_place, returns_nothing
from sf_core.types import Endpoint, NotJudged, Task

_NO_ANSWERS = (
    *(ModuleType, FunctionType, MethodType, BuiltinFunctionType, CoroutineType, type),
    *(Task, Endpoint),
)
"""Types of values that no answer decides."""


def is_certain(error: BaseException, has_answer: bool) -> bool:
    """Whether the error does not depend on an answer. Before the policy has given one, no error does. After
    that an agent may raise anything because it cannot use the scripted answer; certain are only names,
    modules and attributes that a line of the user's own code names and that do not exist."""
    if isinstance(error, LateError | TimeoutError | NotJudged):
        return False
    if not has_answer:
        return True
    if isinstance(error, SyntaxError):
        return is_own(error.filename or "")
    frame = _innermost(error)
    # code of the policy's that `exec` runs has no file
    if frame is None or not is_own(frame.f_code.co_filename):
        return False
    name = str(getattr(error, "name", None))
    # a name that the line itself has: `getattr` may be given one by the policy
    is_written = any(word == name or word.startswith(f"{name}.") for word in frame.f_code.co_names)
    if isinstance(error, UnboundLocalError):
        return False
    if isinstance(error, AttributeError):
        return is_written and isinstance(error.obj, _NO_ANSWERS)
    return is_written and isinstance(error, NameError | ImportError)


def is_certain_of_scoring(
    error: BaseException, agent: Callable[..., Any], reward: Callable[..., Any], answer: Any
) -> bool:
    """The same of an error while an answer of the agent was scored, which may also be that a `return` is
    missing."""
    if isinstance(error, LateError | TimeoutError | NotJudged):
        return False
    lacks_return = returns_nothing(reward) or (answer is None and returns_nothing(agent))
    return lacks_return or is_certain(error, has_answer=True)


def _innermost(error: BaseException) -> FrameType | None:
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return frames[-1] if frames else None


DEADLINE_S = 20.0
"""Longest time of a rehearsal; what has not failed by then counts as working."""

PLAIN_ANSWER = "OK"
"""Answer of the policy to a task without a reference answer."""


@dataclass(frozen=True, slots=True)
class Result:
    refusal: str = ""
    """Why no session can succeed; empty if some may."""
    note: str = ""
    """What else the user should know."""


@dataclass(frozen=True, slots=True)
class _Failure:
    sentence: str
    kind: str
    """Type and place of the error."""
    is_certain: bool


async def rehearse(config: RunConfig) -> Result:
    """Try the first tasks of the run, of each part of its environment."""
    notes: list[str] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            for part in _parts_of(config):
                result = await _rehearse_part(config, part)
                if result.refusal:
                    return result
                notes.append(result.note)
    except TimeoutError:
        notes.append(f"the task that was tried before the start had not ended after {DEADLINE_S:g} s")
    return Result(note=next(filter(None, notes), ""))


def _parts_of(config: RunConfig) -> list[str]:
    """The parts of the environment from which the run takes tasks; one without a name if it has none."""
    curriculum = config.rollout.curriculum
    chosen: set[str] = set()
    for stage in curriculum.stages if curriculum else ():
        chosen.update(part for part, share in stage.shares.items() if share)
    parts = parts_of(config.environment)
    if chosen:
        parts = [part for part in parts if part in chosen]
    return parts or [""]


async def _rehearse_part(config: RunConfig, part: str) -> Result:
    tasks = tasks_of(config.environment)
    first = first_index(config.seed)
    source = [part] if part else []
    first_try = await _try(config, tasks("train", first, *source))
    if not isinstance(first_try, _Failure):
        return Result(note=first_try)
    if not first_try.is_certain:
        return Result(
            note=f"with a scripted answer, {first_try.sentence}; answers of the policy may do better"
        )
    # an error of this task alone costs its sessions, but no run
    second_try = await _try(config, tasks("train", first + 1, *source))
    if isinstance(second_try, _Failure) and second_try.is_certain and second_try.kind == first_try.kind:
        return Result(refusal=first_try.sentence)
    return Result(note=f"on one of two tasks, {first_try.sentence}")


async def _try(config: RunConfig, task: Task) -> _Failure | str:
    """Run a session on the task; returns how it failed, or a note on it."""
    environment = config.environment
    agent = agent_of(environment)
    reward = reward_of(environment)
    phases = Phases(config.rollout, agent, reward, prepare_of(environment))
    work = Work("rehearsal")
    policy = ScriptedPolicy(config, task.answer or PLAIN_ANSWER)
    answer = None
    with policy.serve() as endpoint:
        try:
            answer = await phases.run(work, task, endpoint)
            work.phase = "agent"
            if not policy.num_answers:
                raise NothingAskedError(explain_silence(endpoint))
            # judges cost money, or minutes until they are served
            if not environment.judges:
                if any("reward" in worker.tags for worker in config.cluster.workers.values()):
                    answer = orjson.loads(as_json(answer))
                await phases.score(work, task, answer)
        # user code may raise anything, exit the program or cancel itself
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            function: dict[str, Callable[..., Any] | None] = {"reward": reward, "prepare": None}
            sentence = PhaseError(name_phase(work.phase), error, function.get(work.phase, agent)).sentence()
            certain = is_certain(error, policy.num_answers > 0) and work.cause != "time"
            if work.phase == "reward":
                certain = is_certain_of_scoring(error, agent, reward, answer)
            return _Failure(sentence, f"{type(error).__name__} {own_place(error)}", certain)
    return f"{describe_none(agent)}: {MISSING_RETURN}" if answer is None else ""


def main(config: str, result: str) -> None:
    import_from(user_folders())
    read_authorities_lazily()
    result_of_rehearsal = asyncio.run(
        rehearse(RunConfig.model_validate_json(Path(config).read_text(encoding="utf-8")))
    )
    Path(result).write_text(json.dumps(asdict(result_of_rehearsal)), encoding="utf-8")
    # threads of the user's code may go on
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
