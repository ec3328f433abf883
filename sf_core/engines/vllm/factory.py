"""Makes a vLLM engine from the settings of a run: its server, its model folder and its weights."""

from __future__ import annotations

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.engines.grammar import Vocabularies
from sf_core.engines.vllm.images import MultimodalRequests
from sf_core.engines.vllm.server import (
    GRAMMAR_ARGUMENT,
    EngineServer,
    check_cpu_build,
    check_shape,
    make_arguments,
)
from sf_core.engines.vllm.vllm_engine import VllmEngine
from sf_core.engines.vllm.weight_loading import FullWeights, LoraWeights, PolicyFolder
from sf_core.process.environment_variables import has_gpu, vllm_python
from storage.run_directory import RunDirectory


def make_engine(config: RunConfig, start_dir: str, device: WorkerDevice) -> VllmEngine:
    """An engine whose server is started on this process's device."""
    engine = config.engine
    settings = config.engine.vllm
    on_cpu = not has_gpu()
    if on_cpu:
        check_cpu_build(vllm_python())
    # with adapters, the base model is never reloaded
    untied = on_cpu and config.train.lora is None
    policy = PolicyFolder(start_dir, untied=untied, max_picture_tokens=config.rollout.max_picture_tokens)
    check_shape(policy.config)
    images = (
        MultimodalRequests(policy.image_processor, RunDirectory(config.run_dir).media_dir)
        if policy.image_processor
        else None
    )
    adapters = LoraWeights(start_dir, policy) if config.train.lora else None
    weight_loading = adapters or FullWeights(policy)
    arguments = make_arguments(
        dtype=config.policy.dtype_name,
        context_length=engine.context,
        max_running=engine.max_running,
        kv_bytes=policy.kv_bytes(engine.max_running, engine.context),
        on_cpu=on_cpu,
        adapter_rank=adapters.rank if adapters else None,
        media_dir=images.folder if images else None,
        more=[*[GRAMMAR_ARGUMENT] * settings.follows_grammars, *settings.arguments],
    )
    sleep_level = 0 if on_cpu or adapters else settings.sleep_level
    server = EngineServer(policy.path, arguments, on_cpu=on_cpu, sleep_level=sleep_level)
    vocabularies = Vocabularies(policy.read_tokenizer) if settings.follows_grammars else None
    keep_kv = engine.kv_on_update == "keep"
    return VllmEngine(
        server, weight_loading, policy.vocab_size, engine.context, keep_kv, vocabularies, images
    )
