"""Environments of the public library verifiers: its rows are the tasks, its rollout the agent, its rubric the
reward."""

from __future__ import annotations

import json
from functools import cached_property
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from pydantic import Field, field_validator

from sf_core.environments.environment import Environment
from sf_core.environments.splits import Split
from sf_core.settings import quote
from sf_core.types import Endpoint, Task


class Verifiers(Environment):
    """An installed environment of the library verifiers. The worker that runs the agent scores the answer,
    because the rubric of the environment reads the state of the rollout. If you use your own agent, its text
    is scored as a single answer to the prompt."""

    name: str = Field(min_length=1)
    """Name of the environment, as in `verifiers.load_environment(name)`."""
    arguments: dict[str, Any] = Field({})
    """Arguments for the environment's function `load_environment`."""
    held_out: int = Field(128, ge=1)
    """Number of training rows that are held out. Used only if the environment has no evaluation data."""

    @field_validator("name")
    @classmethod
    def _is_installed(cls, name: str) -> str:
        if find_spec("verifiers") is None:
            raise ValueError(
                "the package verifiers is not installed here: install the extra seamlessflow[verifiers]"
            )
        module = name.replace("-", "_").split("/")[-1]
        if not module.isidentifier() or find_spec(module) is None:
            raise ValueError(
                f"the module {quote(module)} of the verifiers environment {quote(name)} is not installed here"
            )
        return name

    @cached_property
    def _environment(self) -> Any:
        import verifiers  # costs seconds; only a process that needs tasks pays it
        from verifiers.envs import environment

        # made in a thread, and in a process whose signals are not an environment's
        vars(environment)["signal"] = SimpleNamespace(
            signal=lambda number, handler: None, SIGINT=2, SIGTERM=15
        )
        return verifiers.load_environment(self.name, **self.arguments)

    @cached_property
    def _rows(self) -> dict[Split, Any]:
        """Rows of each split. A training row whose prompt is held out is left out."""
        train = self._environment.get_dataset()
        if self._environment.build_eval_dataset() is None:
            if len(train) <= self.held_out:
                raise ValueError(f"{self.name} has {len(train)} rows, too few for held_out {self.held_out}")
            held_out = train.select(range(self.held_out))
        else:
            held_out = self._environment.get_eval_dataset()
        prompts = {json.dumps(prompt) for prompt in held_out["prompt"]}
        kept_rows = [i for i, prompt in enumerate(train["prompt"]) if json.dumps(prompt) not in prompts]
        if not kept_rows:
            raise ValueError(f"{self.name}: all training rows are held out, so no row is left to train on")
        return {"train": train.select(kept_rows), "holdout": held_out}

    def tasks(self, split: Split, index: int) -> Task:
        rows = self._rows[split]
        if split == "holdout" and index >= len(rows):
            raise ValueError(f"held-out index {index}: {self.name} has {len(rows)} held-out tasks")
        number = index % len(rows)
        row = rows[number]
        return Task(
            task_id=f"{self.name}-{split}-{number}",
            environment=self.name,
            prompt=_read_prompt(row["prompt"]),
            answer=str(row.get("answer") or ""),
            # not the row, which may tell the solution
            metadata={"split": split, "row": number},
        )

    async def agent(self, task: Task, endpoint: Endpoint) -> dict[str, Any]:
        environment = self._environment
        output = await environment.run_rollout(
            self._row(task), endpoint.client(), endpoint.model, dict(environment.sampling_args)
        )
        if (error := output.get("error")) is not None:
            raise RuntimeError(f"{self.name}: {error['error_chain_str']}")
        return {part: output[part] for part in ("completion", "reward", "metrics")}

    async def reward(self, task: Task, answer: Any) -> float:
        if not isinstance(answer, str):
            return float(answer["reward"])
        state = await self._environment.init_state(self._row(task), None, "")
        state["completion"] = [{"role": "assistant", "content": answer}]
        await self._environment.rubric.score_rollout(state)
        return float(state["reward"])

    def _row(self, task: Task) -> Any:
        return self._rows[task.metadata["split"]][task.metadata["row"]]


def _read_prompt(prompt: Any) -> str:
    """The last message to the model, or a prompt that is a text."""
    content = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return content if isinstance(content, str) else json.dumps(content)
