"""A real tokenizer with merges."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "what is the sum of 12 and 30? the answer is 42.",
    '{"name": "calc", "arguments": {"expression": "47*83"}}',
    "naïve café — übergrößenträger, 数学は楽しい",
] * 20


def make_model_dir(folder: Path) -> None:
    """Write a byte-level BPE tokenizer with merges and a ChatML template with tools."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    ).save_pretrained(folder)
