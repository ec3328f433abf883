from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from sf_core.training.packing import pack, read_rows
from sf_core.training.torch.network import Network
from tests.sf_core.training.batches import grouped_rows, make_batch

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def qwen() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True))


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=False))


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config)


def granite() -> GraniteForCausalLM:
    """Model that scales its logits after the head."""
    return GraniteForCausalLM(GraniteConfig(**COMMON, logits_scaling=4.0))


def mixture() -> Qwen3MoeForCausalLM:
    """Model whose experts have other names in transformers than in the folder."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    )


@pytest.fixture(params=[qwen, llama, gpt2, granite, mixture], ids=lambda make: make.__name__)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    torch.manual_seed(0)
    request.param().save_pretrained(tmp_path)
    return str(tmp_path)


def test_logits_and_gradients_are_those_of_every_row_by_itself(folder: str) -> None:
    network, reference = Network(folder), Network(folder).model
    rows = read_rows(make_batch(grouped_rows(num_groups=3, group_size=4)))
    for microbatch in pack(rows, max_tokens=120):
        logits = network.logits(microbatch)
        torch.nn.functional.cross_entropy(logits, microbatch.targets, reduction="sum").backward()
    for row in rows:
        ids = torch.tensor(row.token_ids).long()
        trained = torch.tensor(row.loss_mask).nonzero().squeeze(1)
        alone = reference(ids.unsqueeze(0)).logits[0, trained - 1]
        torch.nn.functional.cross_entropy(alone, ids[trained], reduction="sum").backward()
    expected = dict(reference.named_parameters())
    for name, parameter in network.model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, atol=2e-4, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_weights_are_copies_with_the_names_and_values_of_the_folder(folder: str) -> None:
    from safetensors.torch import load_file

    network = Network(folder)
    saved, given = load_file(f"{folder}/model.safetensors"), network.weights()
    assert given.keys() == saved.keys()
    assert all(torch.equal(given[name], saved[name]) and given[name].is_contiguous() for name in saved)
    with torch.no_grad():
        for parameter in network.model.parameters():
            parameter.zero_()
    assert all(torch.equal(given[name], saved[name]) for name in saved)
