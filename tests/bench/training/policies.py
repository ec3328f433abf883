"""Small models of architectures that differ in what a trainer must know."""

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 64
CONTEXT = 48
"""Tokens of the longest row."""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def qwen(**changes: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**COMMON | changes, head_dim=16, tie_word_embeddings=True))


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=False))


def qwen2() -> Qwen2ForCausalLM:
    """Model whose queries, keys and values have a bias."""
    return Qwen2ForCausalLM(Qwen2Config(**COMMON, tie_word_embeddings=False))


def gpt2(vocab_size: int = 64) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config)


def phi() -> PhiForCausalLM:
    """Model whose head has a bias."""
    return PhiForCausalLM(PhiConfig(**COMMON, tie_word_embeddings=False))


def granite() -> GraniteForCausalLM:
    """Model that scales its logits after the head."""
    return GraniteForCausalLM(GraniteConfig(**COMMON, logits_scaling=4.0))


def mixture() -> Qwen3MoeForCausalLM:
    """Model whose experts have other names in transformers than in the folder."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    )


def neox(**changes: int) -> GPTNeoXForCausalLM:
    """Model that the lean decoder does not know, whose queries, keys and values are one layer."""
    few = {name: value for name, value in (COMMON | changes).items() if name != "num_key_value_heads"}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**few, tie_word_embeddings=False))


POLICIES = (qwen, qwen2, llama, gpt2, phi, granite, mixture)
