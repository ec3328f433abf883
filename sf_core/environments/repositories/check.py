"""Says which instances of a data set are right on this host: with their patch all named tests pass, and
without it some do not.

    python -m sf_core.environments.repositories.check RUN.yaml

RUN.yaml is the configuration of a run in the environment `repositories`. What is right elsewhere is often not
right here: tests want other packages, another pytest, or a network. Exits with 1 if an instance is not right.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import cast

from sf_core.config.validation import ConfigError
from sf_core.config.yaml_file import load_config
from sf_core.environments.registry import environment_of
from sf_core.environments.repositories.environment import Repositories

AT_ONCE = 2
"""Sandboxes at once."""


async def faults_of(environment: Repositories, gate: asyncio.Semaphore) -> dict[str, str | None]:
    """What is wrong with each instance, a line by its id; None: nothing. Raises ValueError like `tasks`."""

    async def fault_of(instance_id: str) -> str | None:
        async with gate:
            try:
                return await _fault_of(environment, instance_id)
            except ValueError as error:
                return f"{error}"

    ids = list(environment.instances)
    return dict(zip(ids, await asyncio.gather(*map(fault_of, ids)), strict=True))


async def _fault_of(environment: Repositories, instance_id: str) -> str | None:
    failing = await environment.failing(instance_id, environment.instances[instance_id].patch)
    if failing:
        test, why = next(iter(failing.items()))
        more = f", and {len(failing) - 1} more" if len(failing) > 1 else ""
        last = why.splitlines()[-1].removeprefix("E").strip()
        return f"with its patch {test} fails: {last}{more}"
    if not await environment.failing(instance_id, ""):
        return "its tests pass without its patch"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Say which instances of a data set are right on this host.")
    parser.add_argument("config", help="YAML of a run whose environment is repositories")
    try:
        config = load_config(parser.parse_args().config).environment
        if config.name != "repositories":
            raise ValueError(f"environment.name is {config.name}, and repositories are checked here")
        environment = cast(Repositories, environment_of(config))
        if reason := environment.why_not_here():
            raise ValueError(reason)
        faults = asyncio.run(faults_of(environment, asyncio.Semaphore(AT_ONCE)))
    except (ConfigError, ValueError) as error:
        sys.exit(f"{error}")
    wrong = {instance_id: fault for instance_id, fault in faults.items() if fault is not None}
    for instance_id, fault in wrong.items():
        print(f"{instance_id}: {fault}")
    print(f"{len(faults) - len(wrong)} of {len(faults)} instances are right on this host")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
