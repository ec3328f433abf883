"""The built-in policy: a small Qwen3, or a small Qwen2.5-VL, and its tokenizer, as a Hugging Face folder.

Owns the vocabulary, the chat format and the shape of the network. Trains nothing (see training/warmstart.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sf_core.config import PolicyConfig
from sf_core.config.rollout_config import BUILT_IN_CONTEXT
from sf_core.models.context import builtin_shape
from sf_core.models.images.processor_config import PREPROCESSOR_CONFIG

UNKNOWN = "<unk>"
PADDING = "<pad>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
"""Named by the configuration of every Qwen2.5-VL; never shown."""

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "\t"]

# Whole phrases of the quickstart's tasks keep its prompts a dozen tokens long.
PHRASES = [
    *(f"{role}\n" for role in ("system", "tools", "user", "assistant", "tool")),
    "Spell this word backward (example: sun -> nus): ",
    "What is ",
    "calc",
]

# The same for those of the environment `screen`.
MULTIMODAL_PHRASES = [
    "Press all ",
    " buttons.",
    *("red", "green", "blue", "yellow", "pink", "black"),
    "click ",
]

# An assistant turn is rendered verbatim behind the generation prompt, so that every rendering extends the
# rendering of its prefix and the recorded ids of earlier turns stay valid.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>tools\\n' }}
{%- for tool in tools -%}{{ tool.function.name }}{{ '' if loop.last else ' ' }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' + call.function.name + ' ' + call.function.arguments.values() | join(' ') + '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


MULTIMODAL_TEMPLATE = CHAT_TEMPLATE.replace(
    " + (message.content or '') }}",
    """ }}
{%- if message.content is string -%}{{ message.content }}
{%- elif message.content -%}{%- for part in message.content -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor -%}{%- endif -%}""",
)
"""The same for contents that are lists of texts and images."""

PATCH = 14
MERGED = 2
"""Pixels of a side of the tower's patches, and patches of a side of the square that one token shows."""

MIN_IMAGE_TOKENS = 4
MAX_IMAGE_TOKENS = 256
"""Tokens of the smallest and the largest image."""


def make_policy(folder: str, config: PolicyConfig, seed: int) -> None:
    """Write an untrained policy that transformers and vLLM load.

    The weights are a function of the configuration and the seed.
    """
    tokenizer = make_tokenizer(config.sees)
    shape: dict[str, Any] = dict(
        **builtin_shape(config.hidden_size, config.num_layers),
        vocab_size=len(tokenizer),
        max_position_embeddings=BUILT_IN_CONTEXT,
        tie_word_embeddings=True,
        initializer_range=config.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.sees:
            model: Any = Qwen2_5_VLForConditionalGeneration(_multimodal_policy(shape, tokenizer))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if config.sees:
        Path(folder, PREPROCESSOR_CONFIG).write_text(json.dumps(_PROCESSOR, indent=1), encoding="utf-8")


def _multimodal_policy(shape: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """A Qwen2.5-VL whose language part has this shape."""
    # heads of 32: a sixth of their 16 frequencies is time's, as in the models that are published
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    ids = zip(
        ("vision_start", "vision_end", "image", "video"),
        tokenizer.convert_tokens_to_ids([VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD]),
        strict=True,
    )
    return Qwen2_5_VLConfig(
        text_config=shape | {"rope_parameters": rotation},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGED,
            "temporal_patch_size": 2,
            "window_size": 4 * PATCH,
            "fullatt_block_indexes": [1],
            "out_hidden_size": shape["hidden_size"],
            "initializer_range": 0.1,
        },
        **{f"{name}_token_id": token for name, token in ids},
        **{name: shape[name] for name in ("tie_word_embeddings", "eos_token_id", "pad_token_id", "dtype")},
    )


_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True),
    "rescale_factor": 1 / 255,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGED,
    "size": {
        edge: tokens * (PATCH * MERGED) ** 2
        for edge, tokens in (("shortest_edge", MIN_IMAGE_TOKENS), ("longest_edge", MAX_IMAGE_TOKENS))
    },
    "resample": 3,
}


def make_tokenizer(is_multimodal: bool = False) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, a few whole phrases, the marks of turns and tool calls, and of
    images if the policy is multimodal.

    Text of these characters comes back from its ids unchanged; any other character becomes `<unk>`.
    """
    vocabulary = {token: index for index, token in enumerate([UNKNOWN, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PADDING, TURN_START, TURN_END])
    backend.add_tokens([AddedToken(text, normalized=False) for text in (CALL_START, CALL_END, *PHRASES)])
    marks = [VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD] * is_multimodal
    backend.add_special_tokens(marks)
    backend.add_tokens([AddedToken(text, normalized=False) for text in MULTIMODAL_PHRASES * is_multimodal])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNKNOWN,
        pad_token=PADDING,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START, *marks],
        chat_template=MULTIMODAL_TEMPLATE if is_multimodal else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=BUILT_IN_CONTEXT,
        tool_format="plain",
    )
