"""A rehearsal: one task of a run by its agent and its reward, before anything of the run is started.

An agent that raises would otherwise cost a stack and hundreds of sessions. Loads no weights, and writes
nothing into the folder of the run.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from sf_core.cli.rehearsal.session import DEADLINE_S
from sf_core.cli.stack.local import stack_environment
from sf_core.config import RunConfig
from sf_core.process.child_processes import await_keeper, start_kept
from sf_core.process.import_path import python_module
from sf_core.scheduling.cluster import scheduler_of
from sf_core.stages.preflight.stored_config import begins_anew, has_batch
from storage.run_directory import RunDirectory

START_S = 40.0
"""Time for imports, and for the user's code to put away what it has prepared, in addition to the deadline."""

MAX_TOLD = 600
"""Most characters of an error."""


def check_first_task(config: RunConfig, report: Callable[[str], None]) -> None:
    """Raises ValueError, one sentence, if the agent or the reward fails on the first tasks of the run for a
    reason that no answer of the policy changes. `tell` is called with what else was noticed. `config` has a
    run id. Does nothing where a rehearsal would tell nothing (`is_rehearsed`)."""
    if not is_rehearsed(config):
        return
    report("trying one task with a scripted answer before the start (--skip-try leaves this out)")
    result = _run(config)
    if result.get("refusal"):
        raise ValueError(
            f"{_shorten(result['refusal'])} (so it was for two tasks that were tried with a scripted answer "
            "before the start): correct the code, which `sf try` shows in more detail, or start the run all "
            "the same with --skip-try"
        )
    if result.get("note"):
        report(f"look at this: {_shorten(result['note'])}; the run starts")


def is_rehearsed(config: RunConfig) -> bool:
    """Whether agents of the run work on this machine, and no session of the run is stored yet. Workers of
    another machine may have programs, packages and keys that this one lacks."""
    is_ours = scheduler_of(config) is None and not config.rollout.is_external
    return is_ours and config.engine.kind != "emulated" and not _has_sessions(config)


def _has_sessions(config: RunConfig) -> bool:
    run = RunDirectory(config.run_dir)
    if not run.exists() or begins_anew(config):
        return False
    return has_batch(run) or bool(run.list_partitions("evaluations"))


def _run(config: RunConfig) -> dict[str, str]:
    """Run the rehearsal in a process of its own, which ends in time with all that it has started."""
    with tempfile.TemporaryDirectory(prefix="sf-rehearsal-") as folder, tempfile.TemporaryFile() as log:
        config_file = Path(folder, "config.json")
        result = Path(folder, "result.json")
        config_file.write_text(config.model_dump_json(), encoding="utf-8")
        command = python_module("sf_core.cli.rehearsal.session", str(config_file), str(result))
        channel, keeper = start_kept(
            command,
            grace_s=2.0,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=stack_environment(),
        )
        try:
            keeper.wait(DEADLINE_S + START_S)
        except subprocess.TimeoutExpired:
            return {"note": "the task that was tried before the start did not end and was stopped"}
        finally:
            channel.close()
            await_keeper(keeper)
        if result.exists():
            result_of_process: dict[str, str] = json.loads(result.read_text(encoding="utf-8"))
            return result_of_process
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
        why = f": {lines[-1]}" if lines else ""
        return {"note": f"the process that tried one task before the start ended without a result{why}"}


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_TOLD else f"{text[:MAX_TOLD]} ..."
