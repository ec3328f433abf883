"""Tiny randomly initialised models as Hugging Face folders, with a tokenizer of few tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from sf_core.models.adapter import list_linears
from sf_core.training.policy_folder import read_model_config

CONTROL = ["<end>", "<think>", "</think>", "<tool_call>", "</tool_call>"]

TEXT = [*'0123456789abcdefghijklmnopqrstuvwxyz{}[]:,. -\n"_\\/', '{"', '":', ", ", '"}', "tr"]

STOP = CONTROL.index("<end>")

VOCABULARY = [*CONTROL, *TEXT]


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="/"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))


SIZE: dict[str, Any] = dict(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=128,
    initializer_range=0.3,
)

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZE, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZE),
    "llama": LlamaConfig(**SIZE),
    "llama-yarn": LlamaConfig(**SIZE, rope_parameters=_YARN),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "gpt2": GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3),
}


def linears_of(folder: str) -> dict[str, torch.Size]:
    """Shapes of the linear layers in the blocks of a model folder."""
    return list_linears(read_model_config(folder))


class ModelFolders:
    """Model folders by architecture and seed; each is made once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, kind: str = "qwen3", seed: int = 0) -> str:
        folder = self._root / f"{kind}-{seed}"
        if not folder.exists():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(CONFIGS[kind])
            for name, parameter in model.named_parameters():
                # Initialisation leaves these at 1 and 0, where a wrong use of them would not show.
                if parameter.dim() == 1:
                    torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
            model.save_pretrained(folder)
            write_tokenizer(folder)
        return str(folder)
