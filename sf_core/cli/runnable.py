"""Checks of what a configuration names: its environment, Python references, command and model folder."""

from __future__ import annotations

import os

from sf_core.config import RunConfig
from sf_core.config.programs import Command


def check_runnable(config: RunConfig) -> None:
    """Raises ValueError or OSError, one sentence, if something is not there or cannot be used."""
    from sf_core.environments.registry import (
        agent_of,
        check_host,
        environment_of,
        group_reward_of,
        prepare_of,
        reward_of,
        tasks_of,
    )
    from sf_core.import_path import import_from
    from sf_core.scheduling.cluster import scheduler_of
    from sf_core.stages.settling.start_folder import check_start

    import_from([os.getcwd()])
    for checked in (environment_of, tasks_of, reward_of, group_reward_of, prepare_of):
        checked(config.environment)
    # a program and a sandbox need not be here if the workers are elsewhere
    workers_are_here = scheduler_of(config) is None
    if workers_are_here or not isinstance(config.environment.agent, Command):
        agent_of(config.environment)
    if workers_are_here:
        check_host(config.environment)
    check_start(config)
