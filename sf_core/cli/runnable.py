"""Checks before a run starts: what its configuration names, and the limits and folders of this machine."""

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
    from sf_core.stages.preflight.start_folder import check_start

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


def check_surroundings(config: RunConfig) -> None:
    """Raises OSError, one sentence, if the limits or folders of this machine do not allow the run."""
    from sf_core.process_limits import check_open_files
    from sf_core.scheduling.cluster import scheduler_of
    from sf_core.surroundings import (
        CACHE_DIR,
        PREFECT_HOME,
        cache_dir,
        check_place,
        prefect_api_url,
        prefect_home,
        vllm_python,
    )
    from sf_core.training.registry import check_installed

    check_open_files()
    if prefect_api_url() is None:
        check_place(prefect_home(), *PREFECT_HOME)
    if scheduler_of(config) is None:
        if config.policy.model is None:
            check_place(cache_dir(), *CACHE_DIR)
        if config.engine.kind == "vllm":
            vllm_python()
        check_installed(config)
