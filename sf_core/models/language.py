"""The language model of a policy: the whole policy, or the trained part of a multimodal policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sf_core.models.images.processor_config import MULTIMODAL_MODEL_TYPES, read_image_processor
from storage.files import FileRef, copy_folder
from storage.tensors.weight_delta import FILE_NAME as DELTA
from storage.tensors.weights import load_weights, save_weights

if TYPE_CHECKING:
    import torch

VISION_TOWER_PREFIX = "visual."
"""Begin of the names of the weights in a policy's files that read images. They are not trained."""


def load_with_vision_tower(start: str, version: str) -> dict[str, torch.Tensor]:
    """The weights in the folder of a version, with those of the start folder that no version has: the tower
    of a multimodal policy."""
    if read_image_processor(start) is None:
        return load_weights(version)
    tower = {
        name: tensor for name, tensor in load_weights(start).items() if name.startswith(VISION_TOWER_PREFIX)
    }
    return tower | load_weights(version)


def copy_version(start: str, version: str, folder: str) -> list[FileRef]:
    """Copy the weights in the folder of a version as `load_with_vision_tower` has them; returns the
    copies."""
    if read_image_processor(start) is None:
        return copy_folder(version, folder, exclude=(DELTA,))
    return save_weights(folder, load_with_vision_tower(start, version), 0)


def language_model(config: Any) -> tuple[Any, Any]:
    """The class in transformers, with `from_config` and `from_pretrained`, and the configuration of a
    policy's causal LM. That of a multimodal policy is a Qwen2 whose rotations have three axes. Its weights
    have the names that they have in the policy's files."""
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

    if config.model_type not in MULTIMODAL_MODEL_TYPES:
        return AutoModelForCausalLM, config

    class LanguagePart(Qwen2ForCausalLM):
        _keys_to_ignore_on_load_unexpected = (rf"^{VISION_TOWER_PREFIX}",)

        @classmethod
        def from_config(cls, config: Any, **_: Any) -> Any:
            return cls._from_config(config)

    part = config.get_text_config()
    part.tie_word_embeddings = config.tie_word_embeddings
    return LanguagePart, part
