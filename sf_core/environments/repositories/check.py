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

from sf_core.agents.sandbox import SandboxError
from sf_core.config.validation import ConfigError
from sf_core.config.yaml_file import load_config
from sf_core.environments.registry import environment_of
from sf_core.environments.repositories.environment import Repositories

AT_ONCE = 2
"""Sandboxes at once."""


async def fault_of(environment: Repositories, instance_id: str) -> str | None:
    """What is wrong with an instance, in a line; None: nothing. Raises ValueError or SandboxError if that
    cannot be told."""
    if fault := await environment.fault_of_row(instance_id):
        return fault
    failing = await environment.find_failing(instance_id, environment.instances[instance_id].patch)
    if failing:
        test, why = next(iter(failing.items()))
        more = f", and {len(failing) - 1} more" if len(failing) > 1 else ""
        last = why.splitlines()[-1].removeprefix("E").strip()
        return f"with the patch applied, {test} fails: {last}{more}"
    if not await environment.find_failing(instance_id, ""):
        return "the tests pass without the patch"
    return None


async def _faults(environment: Repositories) -> dict[str, str]:
    """What is wrong, by the ids of the instances that are not right."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def find(instance_id: str) -> str | None:
        async with gate:
            try:
                return await fault_of(environment, instance_id)
            except (ValueError, SandboxError) as error:
                return f"{error}"

    faults = await asyncio.gather(*map(find, environment.instances))
    return {name: fault for name, fault in zip(environment.instances, faults, strict=True) if fault}


def main() -> None:
    parser = argparse.ArgumentParser(description="Check which instances of a data set work on this host.")
    parser.add_argument("config", nargs="+", help="YAML of a run whose environment is repositories")
    try:
        config = load_config(parser.parse_args().config).environment
        if config.name != "repositories":
            raise ValueError(
                f"environment.name is {config.name}, but this command needs environment.name repositories"
            )
        environment = cast(Repositories, environment_of(config))
        if reason := environment.why_not_here():
            raise ValueError(reason)
        faults = asyncio.run(_faults(environment))
    except (ConfigError, ValueError) as error:
        sys.exit(f"{error}")
    for instance_id, fault in faults.items():
        print(f"{instance_id}: {fault}")
    num = len(environment.instances)
    print(f"{num - len(faults)} of {num} instances work on this host")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
