"""What the first tasks of an environment tell before a run begins: mistakes, which are refused, and splits
that share tasks."""

from __future__ import annotations

from sf_core.agents.runner import first_index
from sf_core.config import RunConfig
from sf_core.engines.registry import engine_kind
from sf_core.environments.calls import NoTaskError, find_difference, find_same
from sf_core.environments.registry import (
    draw_tasks,
    parts_of,
    source_of,
    source_of_tasks,
    tasks_of,
)
from sf_core.stages.preflight.idle import foresee_idle
from sf_core.user_code import own_place

NUM_HELD_OUT = 64
NUM_TRAINED = 256
"""Tasks of each split that are compared before a run."""


def foresee(config: RunConfig) -> list[str]:
    """What the first tasks tell of the run, as sentences; nothing of an emulated one."""
    if not engine_kind(config).runs_policy:
        return []
    environment = config.environment
    first = first_index(config.seed)
    held_out = draw_tasks(environment, "holdout", range(min(NUM_HELD_OUT, config.evaluate.num_tasks)))
    trained = draw_tasks(environment, "train", range(first, first + NUM_TRAINED))
    found = foresee_idle(config, () if config.rollout.is_external else trained)
    if not (both := find_same(held_out, trained)):
        return found
    return [
        *found,
        f"{len(both)} of the first {len(held_out)} held-out tasks are also training tasks, for example "
        f"{both[0].task_id}, so their reward does not measure new tasks; keep the splits apart in "
        f"{source_of_tasks(environment)}",
    ]


def check_held_out(config: RunConfig, *, is_trained: bool = True) -> None:
    """Raises ValueError with one sentence if the environment cannot be used, lacks a source of the curriculum
    or has too few held-out tasks, because a missing one would count as one that earned nothing, or if a task
    that is requested twice changes. Requests only the last held-out task and, if the run is trained, the
    first training tasks."""
    _check_sources(config)
    last = config.evaluate.num_tasks - 1
    first = first_index(config.seed)
    check_task(config, "holdout", last, f"evaluate.num_tasks {last + 1}")
    for index in (first, first + 1) if is_trained else ():
        check_task(config, "train", index, "environment.tasks")


def _check_sources(config: RunConfig) -> None:
    stages = config.rollout.curriculum.stages if config.rollout.curriculum else ()
    named = {source: None for stage in stages for source in stage.shares}
    if not named:
        return
    parts = parts_of(config.environment)
    if missing := [source for source in named if source not in parts]:
        there_are = f"its parts are {', '.join(parts)}" if parts else "it has no parts"
        raise ValueError(
            f"rollout.curriculum.stages: {config.environment.name} lacks {', '.join(missing)}; {there_are}"
        )


def check_task(config: RunConfig, split: str, index: int, setting: str) -> None:
    """Raises ValueError with one sentence, which begins with `setting`, if a task cannot be made or changes
    when it is requested again."""
    tasks = tasks_of(config.environment)
    environment = config.environment
    try:
        one = tasks(split, index)
        other = tasks(split, index)
    except NoTaskError as error:
        raise ValueError(f"environment.tasks: {error}") from None
    except Exception as error:  # whatever the user's own lines raise
        asked = f'{source_of(environment, "tasks")}("{split}", {index})'
        place = own_place(error)
        told = f"{type(error).__name__}: {error}" + (f", {place}" if place else "")
        raise ValueError(f"{setting}: {asked} raised {' '.join(told.split())}") from error
    if differs := find_difference(one, other):
        changed = (
            f'{source_of_tasks(environment)} gave different tasks in two calls with ("{split}", {index})'
        )
        raise ValueError(
            f"environment.tasks: {changed}: {differs}. Equal arguments must give equal tasks, "
            "in every process"
        )
