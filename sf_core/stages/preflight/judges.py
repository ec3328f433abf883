"""Whether the judges of a run can be asked, and served, before anything starts."""

from __future__ import annotations

import inspect
from fnmatch import fnmatch
from pathlib import Path

from sf_core.agents.judges.judges import takes_judges
from sf_core.config import RunConfig
from sf_core.engines.vllm.limits import check_cpu_build
from sf_core.environments.registry import group_reward_of, reward_of
from sf_core.models.pretrained.needed_weights import UnknownModelError, check_weights, find_lack_of_codes
from sf_core.scheduling.cluster import scheduler_of, workers_here
from sf_core.surroundings import vllm_python
from sf_core.training.policy_folder import is_quantised, policy_folder, read_model_config
from sf_core.user_code import name_function
from storage.tensors.weights import PICKLES, WEIGHT_FILES, has_weights, open_weights


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
        folder = policy_folder(model)
        setting = f"environment.judges.{name}.model"
        if fault := _find_fault(folder):
            raise ValueError(f"{setting}: {model} {fault}")
        check_served(folder, setting)
    python = vllm_python()
    workers = workers_here(config).values()
    if any("reward" in worker.tags and worker.device == "cpu" for worker in workers):
        check_cpu_build(python)


def check_served(folder: str, setting: str) -> None:
    """Raises ValueError, one sentence that names the setting, if weights that vLLM would serve are not all
    those of the model. They may be quantised, pickled, or of an architecture that only vLLM knows. Whether
    there is a model folder at all is told by who serves it."""
    if not Path(folder, "config.json").is_file():
        return
    names = [path.name for path in Path(folder).iterdir()]
    safe = [name for name in names if fnmatch(name, WEIGHT_FILES[0])]
    if not safe:
        if not any(fnmatch(name, pattern) for name in names for pattern in PICKLES):
            raise ValueError(f"{setting}: {folder} contains no weights (*.safetensors)")
        return
    # others name the one file otherwise, which vLLM reads all the same
    if not has_weights(folder):
        return
    shape = read_model_config(folder, setting)
    try:
        if not is_quantised(folder, shape):
            check_weights(shape, folder, setting)
            return
        stored = open_weights(folder)[0].entries
        lack = find_lack_of_codes(shape, stored)
    except UnknownModelError:
        return
    except (ValueError, OSError) as error:
        raise ValueError(f"{setting}: {error}") from None
    if lack:
        raise ValueError(f"{setting}: {lack.tell(folder, stored)}")


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
