"""The start stage: makes the start folder, whose weights are version 0."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import shutil
import time
import uuid
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sf_core.config import RunConfig
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.environments.environment import Environment
from sf_core.environments.registry import environment_of
from sf_core.models.adapter import list_linears, make_factors
from sf_core.process.environment_variables import cache_dir
from sf_core.stages.preflight.idle import describe_unreached
from sf_core.stages.preflight.lora import TrainedAdapter, find_adapter
from sf_core.stages.preflight.resolve import resolve, values_of
from sf_core.stages.preflight.start_folder import start_fault
from sf_core.stages.run import OpenRun, RunRef, StageResult, commit
from sf_core.stages.warmstart import copy_warmed, find_warmed
from sf_core.training.policy_folder import (
    check_model_folder,
    count_parameters,
    policy_folder,
    read_model_config,
)
from sf_core.training.teacher_folder import TeacherFolder
from storage.files import FileRef, copy_folder, describe, exists, join, read_bytes, write_atomic
from storage.json_files import load_json
from storage.run_directory import RunDirectory
from storage.tensors.weights import PICKLES, load_adapter, open_weights, save_adapter

log = logging.getLogger(__name__)

BUILT_IN = "the built-in policy"
"""What an adapter names as its base, if that is no folder."""


def start(ref: RunRef, *, warmed: bool = False, prompts: Sequence[str] = ()) -> dict[str, Any]:
    """Write the policy that the run starts from, version 0, into the run directory, unless it is there. It is
    written again only if it cannot be used, because nothing can have begun from it then. `warmed`: it is what
    the warm start of the run has made of `policy.model`. `prompts`: the first ones, from which
    the context is derived. Raises ValueError if its files differ from those that were committed."""
    run = OpenRun(ref)
    folder = run.directory.start_dir

    def work() -> StageResult:
        copies, source, copied_s = prepare_start(folder, run.config, warmed=warmed)
        TeacherFolder(folder).check("policy", f"remove {source} and start the run again")
        parameters = count_parameters(folder)
        trained = _find_adapter(run.config, folder, warmed=warmed)
        derived = values_of(resolve(run.config, parameters, folder, prompts, trained))
        dtype = run.config.fill(derived).policy.dtype_name
        changed = {file.uri: file for file in (name_dtype(folder, dtype), *name_stops(folder))}
        outputs = [copy for copy in copies if copy.uri not in changed]
        outputs += changed.values()
        data: dict[str, Any] = {
            "source": source,
            "copied_s": copied_s,
            "parameters": parameters,
            "dtype": dtype,
            "origin": ref.nonce,
        }
        if trained is not None:
            outputs += start_adapter(run.directory.start_adapter_dir, run.config, trained)
            data["adapter"] = trained.describe()
        if derived:
            data["derived"] = derived
        return StageResult(outputs=outputs, data=data)

    if (manifest := run.directory.read_manifest(None, "start")) is not None:
        # every version uses the tokenizer and configuration of the start folder
        run.directory.verify(manifest)
        if (fault := start_fault(run.directory)) is None:
            return manifest.data
        log.warning("%s; the start folder is created again from policy.model", fault)
        run.directory.refuse_superseded(ref.attempt, "make the start folder again")
        run.directory.discard_start()
    return commit(run, None, "start", work).data


def prepare_start(
    folder: str, config: RunConfig, *, warmed: bool = False
) -> tuple[list[FileRef], str, float]:
    """Copy the policy of version 0 into `folder`; returns its files, the folder they came from and how long
    copying took. Its weights keep their dtype, as trainers start from them.

    Raises ValueError if `policy.model` is no Hugging Face folder."""
    if config.policy.model is None:
        source = str(warm_policy(config))
    elif warmed:
        source = RunDirectory(config.run_dir).warmstart_dir
    else:
        source = policy_folder(config.policy.model)
        check_model_folder(source)
    started = time.monotonic()
    copies = copy_warmed(source, folder) if warmed else copy_folder(source, folder, exclude=PICKLES)
    return copies, source, time.monotonic() - started


def _find_adapter(config: RunConfig, folder: str, *, warmed: bool) -> TrainedAdapter | None:
    """The adapter that a run from this model folder starts from; None if it trains all weights."""
    if config.train.lora is None:
        return None
    if warmed:
        made = find_warmed(RunDirectory(config.run_dir).warmstart_dir)
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"adapter": made})})
    shape = read_model_config(folder)
    if fault := describe_unreached(config, shape):
        raise ValueError(fault)
    trained = find_adapter(config, list_linears(shape))
    trained.check_merge(open_weights(folder)[0].entries)
    return trained


def start_adapter(folder: str, config: RunConfig, trained: TrainedAdapter) -> list[FileRef]:
    """Write the adapter of version 0, which keeps the dtype of the one that is copied; returns its files."""
    source = trained.source
    factors = make_factors(trained.shapes, config.seed) if source is None else load_adapter(source)
    return save_adapter(folder, factors, trained.adapter.encode(config.policy.model or BUILT_IN), 0)


def name_dtype(folder: str, dtype: str) -> FileRef:
    """Have the model's configuration name the dtype that transformers and vLLM are to load."""
    shape = read_model_config(folder)
    keys = {"dtype", "torch_dtype"} & shape.keys() or {"dtype"}
    if all(shape.get(key) == dtype for key in keys):
        return describe(join(folder, "config.json"))
    content = json.dumps(shape | dict.fromkeys(sorted(keys), dtype), indent=2)
    return write_atomic(join(folder, "config.json"), content.encode())


def name_stops(folder: str) -> list[FileRef]:
    """Have the model's generation settings name the end of a turn that only its template names, so that the
    trained policy ends its turns there wherever it is served. Returns the file if it was written."""
    renderer = open_renderer(folder)
    if renderer.template_stop is None:
        return []
    file = join(folder, "generation_config.json")
    settings = load_json(read_bytes(file)) if exists(file) else {}
    content = json.dumps(settings | {"eos_token_id": list(renderer.stop_token_ids)}, indent=2)
    return [write_atomic(file, content.encode())]


def warm_policy(config: RunConfig) -> Path:
    """Folder of the built-in policy after its warm start, cached for equal settings, seed and code."""
    from sf_core.models.builtin import make_policy
    from sf_core.training.warmstart import warmstart

    folder = warm_folder(config)
    if not folder.is_dir():
        unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
        make_policy(str(unfinished), config.policy, config.seed)
        if config.policy.warm_steps:
            warmstart(str(unfinished), config)
        try:
            unfinished.rename(folder)
        except OSError:  # another run has just made the same folder
            shutil.rmtree(unfinished)
    return folder


def warm_folder(config: RunConfig) -> Path:
    """Where `warm_policy` keeps its folder, which may not be there yet."""
    settings = config.policy
    environment = environment_of(config.environment)
    of_the_policy = settings.model_dump_json(exclude={"dtype", "adapter"})
    of_its_environment = config.environment.model_dump_json(include={"name", "settings"})
    inputs = f"{of_the_policy}|{settings.warm_steps}|{of_its_environment}|{config.seed}"
    recipe = f"{inputs}|{_recipe_version(environment)}"
    return cache_dir() / "warmstart" / hashlib.sha256(recipe.encode()).hexdigest()[:16]


def _recipe_version(environment: Environment) -> str:
    """Hash of the code that makes the policy, so that the cache is never used for other code. What a module
    of the user's imports is not known."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in _recipe_files(environment))).hexdigest()


def _recipe_files(environment: Environment) -> list[Path]:
    import sf_core.environments
    from sf_core.agents import tool_loop
    from sf_core.dataplane import chat
    from sf_core.dataplane.sessions import images as session_images
    from sf_core.models import builtin, context, decoder, images, language, projections, token_bytes
    from sf_core.models.pretrained import needed_weights
    from sf_core.training import demonstrations, packing, vision_tower, warmstart
    from sf_core.training.torch import network

    modules = (builtin, warmstart, demonstrations, network, context, decoder, projections)
    parts: list[Any] = [
        *modules,
        context,
        language,
        session_images,
        needed_weights,
        token_bytes,
        tool_loop,
        vision_tower,
    ]
    packages = (sf_core.environments, chat, images, packing)
    whole = [Path(package.__path__[0]).rglob("*.py") for package in packages]
    source_files = map(inspect.getfile, [*parts, *environment.classes])
    return [*map(Path, source_files), *sorted(chain(*whole))]
