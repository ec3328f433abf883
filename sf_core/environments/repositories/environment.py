"""Repositories with faults: an agent repairs them by shell in a sandbox, hidden tests say how well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from sf_core.agents.sandbox import Sandbox, SandboxError, open_sandbox, why_no_sandbox
from sf_core.agents.tool_loop import LostToolError, Tool, run_tool_loop
from sf_core.config.programs import SandboxLimits
from sf_core.environments.environment import Environment
from sf_core.environments.repositories.dataset import Instance, check_sources, files_at, read_instances
from sf_core.environments.repositories.scoring import fault_of_row, find_failing_tests
from sf_core.environments.repositories.workspace import changes_of, commit_all, hide_originals, run_shell
from sf_core.environments.splits import Split, split_of
from sf_core.types import Endpoint, Task

MAX_TURNS = 100
"""Most requests of one session. Its context is full before, with most models."""

INSTRUCTIONS = """\
The current folder holds the repository {repo}. Its users report:

<report>
{problem}
</report>

Find the fault and repair it in the source files, by calls of `bash`. Tests that you do not see will be run
afterwards; changes of tests and of their configuration do not count. When you have repaired it, answer in a
sentence without a call."""


@dataclass(frozen=True, slots=True)
class Checkout:
    box: Sandbox
    commit: str
    """Id of the only commit, the repository as it was given."""


class Repositories(Environment):
    dataset: str = Field(min_length=1)
    """URI of the data set: JSON lines or Parquet, with the columns of SWE-bench."""
    repositories: str = Field(min_length=1)
    """Folder of git repositories named owner__name or owner/name, bare or not bare. Or folder or URI of
    archives named owner__name-COMMIT.tar.gz."""
    reward_for: Literal["share", "all"] = Field("share", alias="reward")
    """Reward of a patch. share: the share of the named tests that pass. all: 1 if all named tests pass, 0 if
    not."""
    held_out: float = Field(0.2, gt=0, lt=1)
    """Share of the instances that are held out. The id of an instance decides whether the instance is held
    out."""
    timeout_s: float = Field(300.0, gt=0)
    """Timeout of the hidden tests, in seconds. The same timeout applies to each command of the agent."""
    sandbox: SandboxLimits = SandboxLimits()

    def tasks(self, split: Split, index: int) -> Task:
        """The instances of the split in turn."""
        instances = self._splits[split]
        instance = instances[index % len(instances)]
        return Task(
            task_id=instance.instance_id,
            environment="repositories",
            prompt=INSTRUCTIONS.format(repo=instance.repo, problem=instance.problem_statement.strip()),
            answer=instance.patch,
            metadata={"repo": instance.repo, "base_commit": instance.base_commit},
        )

    def files(self, task: Task) -> Mapping[str, bytes]:
        """The repository, without its history."""
        return self._base(self.instances[task.task_id])

    @asynccontextmanager
    async def prepare(self, task: Task) -> AsyncIterator[Checkout]:
        """The repository in a sandbox of its own."""
        async with self._open(task.task_id) as (box, _, _):
            yield Checkout(box, await commit_all(box))

    async def agent(self, task: Task, endpoint: Endpoint, checkout: Checkout) -> str:
        """Returns what the agent has changed, as a patch."""
        await run_tool_loop(endpoint, task.prompt, [self._bash(checkout.box)], MAX_TURNS)
        return await changes_of(checkout.box, checkout.commit)

    async def reward(self, task: Task, answer: Any) -> dict[str, float]:
        return {"tests": await self.score(task.task_id, answer)}

    async def score(self, instance_id: str, answer: Any) -> float:
        """What a patch earns, or a mapping of changed files to their texts."""
        num_tests = len(self.instances[instance_id].tests)
        share = (num_tests - len(await self.find_failing(instance_id, answer))) / num_tests
        return share if self.reward_for == "share" else float(share == 1)

    async def find_failing(self, instance_id: str, answer: Any) -> dict[str, str]:
        """The named tests that do not pass with such an answer, and why. Raises ValueError with one sentence
        if the row is to blame."""
        async with self._open(instance_id) as opened:
            failing = await find_failing_tests(*opened, answer, self.timeout_s)
        if failing and (fault := await self.fault_of_row(instance_id)):
            number = list(self.instances).index(instance_id) + 1
            raise ValueError(
                f"{self.dataset}, row {number}: {instance_id}: {fault}: correct the row or leave it out; "
                "python -m sf_core.environments.repositories.check checks all rows"
            )
        return failing

    async def fault_of_row(self, instance_id: str) -> str | None:
        """Why no answer can earn everything, whatever the tests say; None: nothing. It is asked once, also if
        sessions of a group ask together."""
        if instance_id not in self._faults:
            if instance_id not in self._asking:
                asking = self._asking[instance_id] = asyncio.create_task(self._ask_row(instance_id))
                asking.add_done_callback(lambda _: self._asking.pop(instance_id))
            self._faults[instance_id] = await asyncio.shield(self._asking[instance_id])
        return self._faults[instance_id]

    async def _ask_row(self, instance_id: str) -> str | None:
        async with self._open(instance_id) as opened:
            return await fault_of_row(*opened, self.timeout_s)

    @asynccontextmanager
    async def _open(self, instance_id: str) -> AsyncIterator[tuple[Sandbox, Instance, dict[str, bytes]]]:
        """A sandbox with the repository, the instance, and the repository's files."""
        instance = self.instances[instance_id]
        base = await asyncio.to_thread(self._base, instance)
        async with open_sandbox(hide_originals(self.sandbox, base), base) as box:
            yield box, instance, base

    def why_not_here(self) -> str | None:
        return why_no_sandbox(self.sandbox.image)

    def _bash(self, box: Sandbox) -> Tool:
        async def bash(command: str) -> str:
            try:
                return await run_shell(box, command, self.timeout_s)
            except SandboxError as error:
                raise LostToolError(str(error)) from error

        return Tool(
            name="bash",
            description="Run a command in the repository, by bash; returns what it prints.",
            parameters={
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
            function=bash,
        )

    def _base(self, instance: Instance) -> dict[str, bytes]:
        return files_at(self.repositories, instance.repo, instance.base_commit)

    @cached_property
    def instances(self) -> dict[str, Instance]:
        """The instances by their ids. Raises ValueError with one sentence."""
        instances = read_instances(self.dataset)
        check_sources(self.repositories, ((instance.repo, instance.base_commit) for instance in instances))
        return {instance.instance_id: instance for instance in instances}

    @cached_property
    def _faults(self) -> dict[str, str | None]:
        """What is wrong with the rows that were looked at, by their ids."""
        return {}

    @cached_property
    def _asking(self) -> dict[str, asyncio.Task[str | None]]:
        """Looks at rows that are going on, by their ids."""
        return {}

    @cached_property
    def _splits(self) -> dict[Split, list[Instance]]:
        splits: dict[Split, list[Instance]] = {"train": [], "holdout": []}
        for instance in self.instances.values():
            splits[split_of(instance.instance_id, self.held_out)].append(instance)
        for split, instances in splits.items():
            if not instances:
                raise ValueError(
                    f"none of the {len(self.instances)} instances of {self.dataset} is in the split {split} "
                    f"with held_out {self.held_out:g}"
                )
        return splits
