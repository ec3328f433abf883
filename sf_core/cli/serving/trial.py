"""`sf try`: one task of an environment with the code of training: the phases of a session, the gateway, the
engine; without a stack."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import typer
from rich.console import Console

from sf_core.agents.authorities import read_authorities_lazily
from sf_core.agents.judges.judges import Judges
from sf_core.agents.phases import MISSING_RETURN, Phases, Work, describe_none, limit_time
from sf_core.agents.runner import as_json
from sf_core.cli.serving.app_thread import serve_app
from sf_core.cli.serving.conversation import Printer, SessionPrinter, keep_looking
from sf_core.cli.serving.forward import Forward
from sf_core.cli.serving.local_plane import LocalPlane, local_plane
from sf_core.cli.serving.mistakes import (
    BlockedError,
    NothingAskedError,
    PhaseError,
    explain_silence,
    name_phase,
    not_blocking,
)
from sf_core.cli.serving.policy import check_run, policy_to_try, rules_for_single_sessions
from sf_core.cli.terminal import console, errors, nothing_else_printed, print_json, say_error
from sf_core.config import RolloutConfig, RunConfig
from sf_core.config.rollout_config import CODE_ERRORS
from sf_core.dataplane.control.client import refusal_of
from sf_core.environments.registry import agent_of, prepare_of, reward_of, tasks_of
from sf_core.process.environment_variables import openai_key
from sf_core.stages.lease import open_judges
from sf_core.stages.preflight.first_tasks import task_fault
from sf_core.types import Endpoint, Task

NAME = "try"
"""Name of the run whose only session is tried."""


@dataclass(frozen=True, slots=True)
class _Served:
    """Where the agent asks, and what is known of it from outside of the agent."""

    endpoint: Endpoint
    print_new: Callable[[], None]
    """Prints what is new in the conversation."""
    has_asked: Callable[[], bool]
    num_answers: Callable[[], int]
    finish: Callable[[dict[str, Any]], Awaitable[None]]
    """Reports the end. Raises ValueError if the report is refused."""
    has_failed: Callable[[], BaseException | None]
    """What ended the engine."""


def run_trial(
    config: RunConfig,
    overrides: Sequence[str],
    split: str,
    index: int,
    endpoint: str | None,
    model: str,
    *,
    as_json: bool,
) -> None:
    """The command `sf try`. `overrides` are part of the configuration. Raises ValueError as `try_one`, and if
    they name a run that is not there."""
    elsewhere = None if endpoint is None else Endpoint(endpoint, openai_key() or "none", model)
    # a file may name the run that is still to come
    names_run = any(change.partition("=")[0].strip() == "run_id" for change in overrides)
    if names_run and elsewhere is None:
        check_run(config)
    printer = Printer(Console(quiet=True) if as_json else console)
    fault = None
    try:
        with nothing_else_printed(as_json):
            try_one(config, split, index, elsewhere, printer)
    except PhaseError as error:
        fault = error
        printer.record["error"] = error.facts()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        print_json(printer.record)
    elif fault is not None:
        errors.print(fault.traceback(), end="", soft_wrap=True)
        say_error(fault.sentence())
    if fault is not None:
        raise typer.Exit(1)


def try_one(config: RunConfig, split: str, index: int, elsewhere: Endpoint | None, printer: Printer) -> None:
    """Run the agent on a task and print what happens. Raises PhaseError if the user's code fails, ValueError
    if its tasks change, there is nothing to serve or the endpoint does not answer."""
    read_authorities_lazily()
    task = _task(config, split, index)
    printer.task(task, split, index)
    open_endpoint = _at(elsewhere, printer) if elsewhere else _with_policy(config, task, printer)
    with open_judges(config.environment, "reward") as judges, open_endpoint as served:
        printer.rewarded(asyncio.run(_run(config, task, served, printer, judges)))


def _task(config: RunConfig, split: str, index: int) -> Task:
    tasks = tasks_of(config.environment)
    try:
        task = tasks(split, index)
    except (Exception, SystemExit) as error:
        raise PhaseError(f"tasks({split!r}, {index})", error, tasks) from error
    if fault := task_fault(config, split, index, "environment.tasks"):
        raise ValueError(fault)
    return task


async def _run(
    config: RunConfig, task: Task, served: _Served, printer: Printer, judges: Judges | None
) -> dict[str, Any]:
    """The fields of a report on the session."""
    environment = config.environment
    rules = config.rollout
    agent = agent_of(environment)
    reward = reward_of(environment)
    phases = Phases(rules, agent, reward, prepare_of(environment), judges=judges)
    work = Work(NAME)
    async with not_blocking(), judges or nullcontext():
        try:
            answer = await _unless_engine_fails(_in_time(phases, work, task, served, rules), served)
            served.print_new()
            _say_output(printer, work)
            printer.answered(answer)
            work.phase = "agent"
            if not served.num_answers():
                raise NothingAskedError(explain_silence(served.endpoint))
            if any("reward" in worker.tags for worker in config.cluster.workers.values()):
                answer = orjson.loads(as_json(answer))
            scored = await phases.score(work, task, answer)
            for judged in work.judgements:
                printer.judged(judged)
            if answer is None:
                printer.print_note(f"{describe_none(agent)}: {MISSING_RETURN}")
            named = {"task_id": task.task_id, "environment": task.environment}
            await served.finish({"status": "finished", **scored, **named})
        except _EngineLostError as error:
            raise ValueError(f"the policy cannot be served: {error.__cause__}") from error
        except (Exception, SystemExit, BlockedError) as error:
            served.print_new()
            _say_output(printer, work)
            function = {"reward": reward, "prepare": None}.get(work.phase, agent)
            failure = PhaseError(name_phase(work.phase), error, function)
            is_told = isinstance(error, (NothingAskedError, *CODE_ERRORS)) or work.phase != "agent"
            if not (is_told or served.has_asked()):
                printer.print_note(explain_silence(served.endpoint))
            raise failure from error
    return scored


def _say_output(printer: Printer, work: Work) -> None:
    if output := work.facts.pop("output", ""):
        printer.output(output)


class _EngineLostError(Exception):
    """The engine ended before the agent had."""


async def _in_time(phases: Phases, work: Work, task: Task, served: _Served, rules: RolloutConfig) -> Any:
    async with limit_time("the agent ran", "session_timeout_s", rules.session_timeout_s):
        return await phases.run(work, task, served.endpoint)


async def _unless_engine_fails(running: Awaitable[Any], served: _Served) -> Any:
    agent = asyncio.ensure_future(running)
    try:
        while not (await asyncio.wait({agent}, timeout=0.2))[0]:
            if (failure := served.has_failed()) is not None:
                raise _EngineLostError from failure
        return await agent
    finally:
        agent.cancel()


@contextmanager
def _at(elsewhere: Endpoint, printer: Printer) -> Iterator[_Served]:
    async def finish(report: dict[str, Any]) -> None: ...

    printer.policy(f"{elsewhere.model} at {elsewhere.base_url}, which reports no token ids")
    forward = Forward(elsewhere.base_url, elsewhere.api_key, printer)
    with serve_app(forward) as url:
        endpoint = Endpoint(f"{url}/v1", forward.agents_key, elsewhere.model)
        yield _Served(
            endpoint,
            lambda: None,
            lambda: forward.has_asked,
            lambda: forward.num_answers,
            finish,
            lambda: None,
        )


@contextmanager
def _with_policy(config: RunConfig, task: Task, printer: Printer) -> Iterator[_Served]:
    with tempfile.TemporaryDirectory(prefix="sf-try-") as folder:
        policy = policy_to_try(config, Path(folder))
        printer.policy(policy.about)
        rollout = rules_for_single_sessions(policy.config.rollout, num_groups=1)
        run_dir = f"{folder}/{NAME}"
        # nobody else takes the place of the only group
        key = secrets.token_urlsafe(24)
        with local_plane(policy, name=NAME, run_dir=run_dir, rollout=rollout, key=key) as plane:
            yield from _session(plane, key, task, printer)


def _session(plane: LocalPlane, key: str, task: Task, printer: Printer) -> Iterator[_Served]:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=plane.url, headers=headers, trust_env=False, timeout=60.0) as http:
        body = {"size": 1, "task_id": task.task_id, "environment": task.environment}
        [opened] = http.post(f"/runs/{NAME}/groups", json=body).raise_for_status().json()["sessions"]
        session = plane.run.sessions[opened["session_id"]]
        session_printer = SessionPrinter(printer, plane.run.renderer, session)

        async def finish(report: dict[str, Any]) -> None:
            session_printer.print_new()  # the session is gone afterwards
            url = f"/sessions/{session.session_id}/finish"
            response = await asyncio.to_thread(http.post, url, json=report)
            if response.is_error:
                raise ValueError(refusal_of(response))

        endpoint = Endpoint(opened["base_url"], opened["key"], "policy")
        with keep_looking(session_printer.print_new):
            yield _Served(
                endpoint,
                session_printer.print_new,
                lambda: bool(session.prompts),
                lambda: len(session.turns),
                finish,
                lambda: plane.failure,
            )
