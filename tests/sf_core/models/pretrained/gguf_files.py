"""Small GGUF files of the Llama family, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '<end>' }}{% endfor %}assistant: "
TOKENS = ["<end>", *(chr(code) for code in range(33, 127)), "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", "he"]

PLACES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def write_gguf(file: Path, model: LlamaForCausalLM) -> None:
    shape = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(_named(name), _ordered(name, tensor, model).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, number, place = name.split(".", 3)
        return f"blk.{number}.{PLACES[place.removesuffix('.weight')]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def _ordered(name: str, tensor: torch.Tensor, model: LlamaForCausalLM) -> torch.Tensor:
    """The rotary pairs of queries and keys as neighbours, which is llama.cpp's order."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for projection, count in heads.items():
        if projection in name:
            return tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
    return tensor
