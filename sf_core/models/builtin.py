"""The built-in policy: a small Qwen3 and its tokenizer, saved as an ordinary Hugging Face folder.

Owns the vocabulary, the chat format and the shape of the network. Trains nothing (see training/warmstart.py).
"""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sf_core.config import PolicyConfig
from sf_core.config.rollout_config import BUILT_IN_CONTEXT
from sf_core.models.cache_size import built_in_shape

UNKNOWN, PADDING, TURN_START, TURN_END = "<unk>", "<pad>", "<|im_start|>", "<|im_end|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "\t"]

# Whole phrases of the quickstart's tasks keep its prompts a dozen tokens long.
PHRASES = [
    *(f"{role}\n" for role in ("system", "tools", "user", "assistant", "tool")),
    "Spell this word backward (example: sun -> nus): ",
    "What is ",
    "calc",
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


def make_policy(folder: str, config: PolicyConfig, seed: int) -> None:
    """Write an untrained policy that AutoModelForCausalLM, AutoTokenizer and vLLM load.

    The weights are a function of the configuration and the seed.
    """
    tokenizer = make_tokenizer()
    shape = Qwen3Config(
        **built_in_shape(config.hidden_size, config.num_layers),
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
        model = Qwen3ForCausalLM(shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, a few whole phrases, the marks of turns and tool calls.

    Text of these characters comes back from its ids unchanged; any other character becomes `<unk>`.
    """
    vocabulary = {token: index for index, token in enumerate([UNKNOWN, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PADDING, TURN_START, TURN_END])
    backend.add_tokens([AddedToken(text, normalized=False) for text in (CALL_START, CALL_END, *PHRASES)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNKNOWN,
        pad_token=PADDING,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=BUILT_IN_CONTEXT,
        tool_format="plain",
    )
