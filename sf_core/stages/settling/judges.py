"""Whether the judges of a run can be asked, and served, before anything starts."""

from __future__ import annotations

import inspect
from pathlib import Path

from sf_core.agents.judges.judges import takes_judges
from sf_core.config import RunConfig
from sf_core.engines.vllm.limits import check_cpu_build
from sf_core.environments.registry import group_reward_of, reward_of
from sf_core.scheduling.cluster import scheduler_of, workers_here
from sf_core.surroundings import vllm_python
from sf_core.training.policy_folder import policy_folder
from sf_core.user_code import name_function


def check_judges(config: RunConfig) -> None:
    """Raises ValueError or OSError, one sentence, if nobody asks the judges of a run, a function asks some
    and there are none, or one cannot be served by workers of this machine."""
    environment = config.environment
    found = (reward_of(environment), group_reward_of(environment))
    asking = [function for function in found if function is not None and takes_judges(function)]
    if environment.judges and not asking:
        raise ValueError(
            "environment.judges: no function uses judges; give environment.reward or "
            "environment.group_reward a parameter `judges`, or leave environment.judges out"
        )
    for function in asking if not environment.judges else ():
        if inspect.signature(function).parameters["judges"].default is inspect.Parameter.empty:
            told = (
                f"environment.judges: {name_function(function)} has a parameter `judges`, but no judges are "
                "configured"
            )
            raise ValueError(f"{told}; add them to environment.judges")
    if not environment.served_judges or scheduler_of(config) is not None:
        return
    for name, model in environment.served_judges.items():
        if fault := _find_fault(policy_folder(model)):
            raise ValueError(f"environment.judges.{name}.model: {model} {fault}")
    python, workers = vllm_python(), workers_here(config).values()
    if any("reward" in worker.tags and worker.device == "cpu" for worker in workers):
        check_cpu_build(python)


def _find_fault(folder: str) -> str | None:
    """Why vLLM would not serve conversations with the model in this folder; None if it would."""
    if not Path(folder, "config.json").is_file():
        return "is not a Hugging Face folder: config.json is missing"
    settings = Path(folder, "tokenizer_config.json")
    files = (Path(folder, name) for name in ("chat_template.jinja", "chat_template.json"))
    if any(map(Path.is_file, files)) or (
        settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")
    ):
        return None
    return "has no chat template, which judges need: add chat_template.jinja to the folder"
