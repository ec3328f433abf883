"""What the first tasks of an environment tell before a run begins: mistakes, which are refused, and splits
that share tasks."""

from __future__ import annotations

from sf_core.agents.runner import first_index
from sf_core.config import RunConfig
from sf_core.engines.registry import engine_kind
from sf_core.environments.environment import NoTaskError, find_difference, find_same
from sf_core.environments.registry import (
    draw_tasks,
    parts_of,
    source_of,
    source_of_tasks,
    tasks_of,
)
from sf_core.process.user_code import own_place
from sf_core.stages.preflight.facts import Facts
from sf_core.stages.preflight.idle import warn_of_idle

NUM_HELD_OUT = 64
NUM_TRAINED = 256
"""Tasks of each split that are compared before a run."""


def predict_warnings(config: RunConfig) -> list[str]:
    """Warnings of the settings and of the first tasks of a run, as sentences; none of an emulated run."""
    if not engine_kind(config).runs_policy:
        return []
    environment = config.environment
    first = first_index(config.seed)
    held_out = draw_tasks(environment, "holdout", range(min(NUM_HELD_OUT, config.evaluate.num_tasks)))
    trained = draw_tasks(environment, "train", range(first, first + NUM_TRAINED))
    found = warn_of_idle(config, () if config.rollout.is_external else trained)
    if not (both := find_same(held_out, trained)):
        return found
    return [
        *found,
        f"{len(both)} of the first {len(held_out)} held-out tasks are also training tasks, for example "
        f"{both[0].task_id}, so their reward does not measure new tasks; keep the splits apart in "
        f"{source_of_tasks(environment)}",
    ]


def curriculum_fault(config: RunConfig, facts: Facts) -> str | None:
    """A source of the curriculum that the environment lacks."""
    stages = config.rollout.curriculum.stages if config.rollout.curriculum else ()
    named = {source: None for stage in stages for source in stage.shares}
    if not named:
        return None
    parts = parts_of(config.environment)
    missing = [source for source in named if source not in parts]
    if not missing:
        return None
    there_are = f"its parts are {', '.join(parts)}" if parts else "it has no parts"
    return f"rollout.curriculum.stages: {config.environment.name} lacks {', '.join(missing)}; {there_are}"


def tasks_fault(config: RunConfig, facts: Facts) -> str | None:
    """Too few held-out tasks, because a missing one would count as one that earned nothing, or tasks that
    change. Requests only the last held-out task and the first training tasks."""
    num_tasks = config.evaluate.num_tasks
    first = first_index(config.seed)
    asked = {
        "holdout": ((num_tasks - 1, f"evaluate.num_tasks {num_tasks}"),),
        "train": ((first, "environment.tasks"), (first + 1, "environment.tasks")),
    }
    for split in facts.splits:
        for index, setting in asked[split]:
            if fault := task_fault(config, split, index, setting):
                return fault
    return None


def task_fault(config: RunConfig, split: str, index: int, setting: str) -> str | None:
    """One sentence, which begins with `setting`, if a task cannot be made or changes when it is requested
    again."""
    tasks = tasks_of(config.environment)
    environment = config.environment
    try:
        one = tasks(split, index)
        other = tasks(split, index)
    except NoTaskError as error:
        return f"environment.tasks: {error}"
    except Exception as error:  # whatever the user's own lines raise
        asked = f'{source_of(environment, "tasks")}("{split}", {index})'
        place = own_place(error)
        told = f"{type(error).__name__}: {error}" + (f", {place}" if place else "")
        return f"{setting}: {asked} raised {' '.join(told.split())}"
    differs = find_difference(one, other)
    if not differs:
        return None
    return (
        f"environment.tasks: {source_of_tasks(environment)} gave different tasks in two calls with "
        f'("{split}", {index}): {differs}. Equal arguments must give equal tasks, in every process'
    )
