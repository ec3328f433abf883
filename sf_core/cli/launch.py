"""Runs a flow from the terminal: starts what the configuration does not name, then the flow, and shows it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sf_core.cli.arguments.services import check_services
from sf_core.cli.duration import Estimate
from sf_core.cli.live import HeldOutRewards, LineProgress, NewLines, RunProgress
from sf_core.cli.rehearsal.check import check_first_task
from sf_core.cli.serving.policy import LONGEST_S, ask_greedily, has_greedy_answers
from sf_core.cli.stack.command_lock import HeldError, lock_run
from sf_core.cli.stack.local import local_stack, name_started, start_services
from sf_core.cli.stack.processes import Part
from sf_core.cli.stack.supervisor import Process, StackError, Supervisor
from sf_core.config import RunConfig
from sf_core.config.rollout_config import failures_text
from sf_core.dataplane.control.client import DataplaneClient, DataplaneError
from sf_core.dataplane.operator_key import operator_key
from sf_core.engines.registry import engine_kind
from sf_core.process.environment_variables import (
    STACK_FOLDER,
    dataplane_url,
    prefect_api_url,
)
from sf_core.process.import_path import python_module
from sf_core.reports.evaluations.comparison import Examples, read_greedy, side_by_side
from sf_core.reports.states import is_finished
from sf_core.reports.tables import answers_table
from sf_core.reports.view import RunView
from sf_core.scheduling.cluster import await_plan, find_workers, scheduler_of, workers_here
from sf_core.scheduling.plan import make_plan
from sf_core.stages.evaluate import open_evaluation
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import SPLITS, Facts
from sf_core.stages.preflight.sizes import bytes_of_two_workers, explain_sizes
from sf_core.stages.preflight.stored_config import resolve_config
from sf_core.stages.run import new_run_id
from sf_core.training.backends import trainer_kind
from storage.errors import StorageError
from storage.files import absolute, check_writable, open_read, read_bytes, write_atomic
from storage.run_directory import RunDirectory

FLOW_STARTS = 3
"""Maximum number of starts of a flow that fails after a process that it needs was restarted."""

FREED_S = 30.0
"""Time for a flow to free the workers of a cluster that stays (tasks/interruption.py) before it is killed."""

# what sf_core/agents/runner.py logs above a traceback; the text of an error may differ between sessions
_SESSION_FAILED = re.compile(r"session \S+ failed: (.+?: (?:tasks|prepare|agent|reward) raised \w+)")


class LaunchError(RuntimeError):
    """The run failed; the message says why and how to resume it."""


def launch(
    flow: str, config: RunConfig, console: Console, *, says_result: bool = True, rehearses: bool = False
) -> None:
    """Run `flows.<flow>` to its end. In any case, every process started here has ended afterwards.
    `rehearses`: one task is tried before anything starts."""
    started_at = time.time()
    name = config.run_id or new_run_id("run")
    storage = config.storage.model_copy(update={"root": absolute(config.storage.root)})
    config = config.model_copy(update={"run_id": name, "storage": storage})
    directory = RunDirectory(config.run_dir)
    check_writable(config.storage.root)
    report = partial(console.print, soft_wrap=True)
    try:
        if flow == "evaluate":
            evaluation = open_evaluation(config, report)
            if evaluation.measured is not None:
                return
            config = evaluation.config
        else:
            # first: the caller may ask for more iterations than are done
            config = resolve_config(config, report)
            if is_finished(RunView(directory), config.train.iterations):
                more = "to continue it, raise train.iterations; to start a new run, set another run_id"
                report(f"run {name} is already finished; {more}")
                return _print_result(directory, config, console)
        check_services(config)
        scheduler = scheduler_of(config)
        if scheduler:
            await_plan(scheduler, config, report)
        trains = flow == "train"
        facts = Facts(config, splits=SPLITS if trains else ["holdout"], writes=trains, starts_services=True)
        worker_bytes = bytes_of_two_workers(facts.sizes)
        facts.workers = find_workers(config, worker_bytes=worker_bytes)
        if not scheduler:
            make_plan(facts.workers, config)
        preflight(facts)
        explained = explain_sizes(config, facts.sizes) if trains else {}
        estimate = Estimate(config, facts.sizes) if trains else None
    except ValueError as error:
        raise LaunchError(str(error)) from None
    local = Path(directory.local_dir)
    if rehearses:
        try:
            check_first_task(config, report)
        except ValueError as error:
            raise LaunchError(str(error)) from None
    local.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_run(directory)
    except HeldError as error:
        raise LaunchError(str(error)) from None
    where = directory.uri if directory.is_local else f"{directory.uri}, logs in {local / 'logs'}"
    console.print(Text.assemble("run ", (name, "bold"), f" in {where}"), soft_wrap=True)
    for subject in ("memory", "disk"):
        if subject in explained:
            report(f"{subject}: {explained[subject]}")
    env = {"SF_STARTED_AT": str(started_at)}
    if not (engine_kind(config).needs_torch or trainer_kind(config).computes_weights):
        env["SF_EMULATED"] = "1"
    with lock, ExitStack() as ended, local_stack(local / "logs", env) as stack:
        if scheduler_of(config) is not None:
            stack.stop_s = FREED_S
        try:
            _run(flow, config, worker_bytes, stack, ended, local, console, estimate)
        except StackError as error:
            raise LaunchError(str(error)) from None
        except KeyboardInterrupt:
            console.print(f"stopped; {_how_to_go_on(flow, name)}")
            raise
    if flow == "train":
        _print_result(directory, config, console)
    elif says_result:
        report(evaluation.describe())


def _run(
    flow: str,
    config: RunConfig,
    worker_bytes: int,
    stack: Supervisor,
    ended: ExitStack,
    local: Path,
    console: Console,
    estimate: Estimate | None,
) -> None:
    """Start the services and the flow, and wait for its end. `ended` is closed after the stack has ended."""
    dataplane = config.dataplane.url or dataplane_url()
    with _progress(console, config.train.iterations) as progress:
        if started := name_started(prefect_api_url(), scheduler_of(config), dataplane):
            progress.show_status(f"starting {started}")
        ready = start_services(
            stack,
            local,
            workers_here(config, worker_bytes),
            api=prefect_api_url(),
            scheduler=scheduler_of(config),
            dataplane=dataplane,
        )
        services = ready()
        if dataplane is None:
            ended.callback(_note_end, config, services.dataplane)
        progress.show_status(f"watch it at {services.api.removesuffix('/api')}")
        if estimate is not None and (duration := estimate.describe()):
            progress.show_status(duration)
        if config.rollout.outside_groups:
            progress.show_status(f"external agents find the data plane at {services.dataplane}")
        file = local / "flow.json"
        write_atomic(str(file), config.model_dump_json().encode())
        # addresses are not in the stored configuration: the next attempt may have others
        command = python_module(f"flows.{flow}", str(file))
        part = Part(f"flow-{flow}", command, services.addresses, once=True)
        watch = partial(
            _watch,
            config=config,
            dataplane=services.dataplane,
            progress=progress,
            logged=NewLines(stack.logs / f"{part.name}.log"),
        )
        lost: list[str] = []
        for _ in range(FLOW_STARTS):
            if lost:
                progress.show_status(
                    f"{', '.join(lost)} ended, and the flow failed with it; both are restarted"
                )
                ready()
            failure, lost = _run_once(part, stack, watch)
            if not (failure and lost):
                break
    if failure:
        raise LaunchError(f"{failure}; {_how_to_go_on(flow, str(config.run_id))}")


@contextmanager
def _progress(console: Console, iterations: int) -> Iterator[RunProgress | LineProgress]:
    """Live display in a terminal, log lines elsewhere."""
    if console.is_terminal:
        live = RunProgress(console, iterations)
        with Live(live, console=console, refresh_per_second=4):
            yield live
    else:
        yield LineProgress(console)


def _note_end(config: RunConfig, dataplane: str) -> None:
    """Record that the data plane has ended, so that nothing waits for its restart."""
    with suppress(ValueError, StorageError):
        RunDirectory(config.run_dir).end_attempt(dataplane, socket.gethostname())


def _how_to_go_on(flow: str, run_id: str) -> str:
    return "continue with the same command" + (f" and --set run_id={run_id}" if flow == "train" else "")


def _run_once(part: Part, stack: Supervisor, watch: Callable[[Process], int]) -> tuple[str, list[str]]:
    """Run the flow once. Returns why it failed, empty if it did not, and the processes restarted."""
    log = stack.logs / f"{part.name}.log"
    log_bytes = log.stat().st_size if log.exists() else 0
    [process] = stack.start(part)
    before = stack.pids()
    try:
        code = watch(process)
    finally:
        # first: the flow would report the loss of everything else as errors
        stack.remove(process)
    failure = ""
    if code:
        reason = _reason(log, log_bytes, code)
        failure = f"{reason.removesuffix('.')}; log: {_log_of_session(reason, stack.logs) or log}"
    return failure, [name for name, pid in stack.pids().items() if before.get(name, pid) != pid]


def _watch(
    process: Process,
    config: RunConfig,
    dataplane: str,
    progress: RunProgress | LineProgress,
    logged: NewLines,
) -> int:
    """Show progress until the flow ends; returns its exit code."""
    client = DataplaneClient(dataplane, str(config.run_id), operator_key(dataplane), patience_s=0.5)
    held_out = HeldOutRewards(config)
    while True:
        # before reading the log, so that its last lines are read too
        code = process.code()
        for line in logged.read():
            progress.hear(line)
        if code is not None:
            return code
        with suppress(httpx.HTTPError, DataplaneError):
            progress.update(client.status(), held_out.refresh())
        time.sleep(0.4)


def _reason(log: Path, begins_at: int, code: int) -> str:
    """The last line with an error that this flow logged; earlier starts have written to the same file."""
    logged = read_bytes(str(log))
    # a shorter file was rotated meanwhile
    own = logged[begins_at:] if len(logged) >= begins_at else logged
    lines = own.decode(errors="replace").splitlines()
    stated = [line for line in lines if "Error:" in line and not line.startswith(" ")]
    return stated[-1] if stated else f"the flow ended with code {code}"


def _log_of_session(reason: str, logs: Path) -> Path | None:
    """The log of a worker that has the traceback of the user's error that the reason tells of; None: there is
    no such error, or the worker is neither the run's nor of a stack that `sf up` started in this folder."""
    stacks = STACK_FOLDER.absolute() / "logs"
    for folder in (logs, stacks):
        for log in sorted(folder.glob("worker-*.log")):
            if _has_failed_session(log, reason):
                return log
    return None


def _has_failed_session(log: Path, reason: str) -> bool:
    """Whether a worker has logged the failure of a session with an error that the reason tells of."""
    with open_read(str(log)) as lines:
        for line in lines:
            failure = _SESSION_FAILED.search(line.decode(errors="replace"))
            if failure and failure[1] in reason:
                return True
    return False


_SHOWN = (
    *("reward_before", "reward_after", "seconds_total"),
    *("tokens_generated", "tokens_sampled", "tokens_per_second"),
    *("idle_fraction", "idle_by_cause"),
)
"""Figures of a summary that every summary has."""


def _print_result(directory: RunDirectory, config: RunConfig, console: Console) -> None:
    summary = directory.read_summary()
    assert summary is not None, "a run that ended well has its summary"
    if missing := [name for name in _SHOWN if name not in summary]:
        raise LaunchError(
            f"{directory.path('summary.json')}: the field {missing[0]} is missing; remove the file, and "
            "repeat the command to write it again"
        )
    causes = summary["idle_by_cause"]
    idle = ", ".join(
        f"{worker} {share:.0%}{_causes(causes.get(worker, {}))}"
        for worker, share in summary["idle_fraction"].items()
    )
    has_policy = trainer_kind(config).computes_weights
    policy = directory.policy_dir if has_policy else "none, because it is emulated"
    api = prefect_api_url()
    server = api.removesuffix("/api") if api else "prefect server start   (then http://127.0.0.1:4200)"
    uses = f"  use it         sf serve {directory.uri}\n" if has_policy else ""
    rewards = f"{summary['reward_before']:.2f} → {summary['reward_after']:.2f}"
    result = Text.assemble(
        "\nheld-out reward  ",
        (rewards, "bold"),
        f"  in {summary['iterations']} iterations, {summary['seconds_total']:.0f} s\n"
        f"tokens           {describe_tokens(summary)}\n"
        f"idle devices     {idle}\n"
        f"picture          {directory.path('summary.png')}\n"
        f"policy           {policy}\n{uses}"
        f"trajectories     {directory.path('trajectories')}\n"
        f'  open them      python -c "import pandas; '
        f"print(pandas.read_parquet('{directory.path('trajectories')}'))\"\n"
        f"  or             sf inspect {directory.uri}\n"
        f"Prefect UI       {server}",
    )
    console.print(result, soft_wrap=True)
    if failures := summary.get("failures"):
        console.print(f"failed sessions  {failures_text(failures)}", soft_wrap=True)
    for concern in summary.get("concerns", ()):
        console.print(f"look at this     {concern}", soft_wrap=True)
    try:
        examples = _find_examples(directory, config, summary["iterations"], console)
    except ValueError as error:  # a file was removed or damaged since
        console.print(f"answers cannot be shown: {error}", soft_wrap=True)
    else:
        if examples.pairs:
            console.print(f"answers          {examples.selection}", soft_wrap=True)
            console.print(answers_table(examples.pairs, "before", "after"))


def _find_examples(directory: RunDirectory, config: RunConfig, version: int, console: Console) -> Examples:
    """Answers before and after the run, with greedy ones. Raises ValueError if a file is broken."""
    examples = side_by_side(RunView(directory), 0, version)
    # they cost seconds, which are for somebody who looks
    is_asked = console.is_terminal and examples.pairs and has_greedy_answers(config)
    if not is_asked or read_greedy(directory, version):
        return examples
    console.print(f"asking the policy for its greedy answers, for {LONGEST_S:.0f} s at most", soft_wrap=True)
    if why := ask_greedily(directory, version, examples.task_ids):
        console.print(f"there are no greedy answers, because {why}", soft_wrap=True)
    return side_by_side(RunView(directory), 0, version)


def describe_tokens(summary: Mapping[str, Any]) -> str:
    """How many tokens a run has sampled, and how fast if that is known."""
    sampled = summary["tokens_sampled"]
    sealed = summary["tokens_generated"]
    counts = f"{sampled:,} sampled, {sealed:,} of them in sessions that count"
    speed = summary["tokens_per_second"]
    return counts if speed is None else f"{counts}, {speed:,.0f} per second"


def _causes(shares: Mapping[str, float]) -> str:
    """Why a device was idle, the largest share first; a cause below half a percent is left out."""
    named = sorted((cause for cause in shares if shares[cause] >= 0.005), key=lambda cause: -shares[cause])
    return f" ({', '.join(f'{cause} {shares[cause]:.0%}' for cause in named)})" if named else ""
