"""Model folders whose prompts are compared: chat templates written after published ones (templates/; the
first line of each names its source and licence), each with small made tokenizers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane.conversations import TEMPLATES

_TEMPLATES = (Path(__file__).parent / "templates", TEMPLATES)

TOKENIZERS = ("byte_level", "first", "always", "never")
"""Families of tokenizers: byte-level BPE, and BPE with each of SentencePiece's `prepend_scheme`s."""

SPECIAL = (
    *("<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "[INST]", "[/INST]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<start_of_turn>", "<end_of_turn>"),
)
_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_CORPUS = [
    "the quick brown fox jumps over the lazy dog. user assistant system tool developer think",
    '{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {}}}',
    "naïve café übergrößenträger 数学は楽しい",
] * 20


class Kind(NamedTuple):
    """What a folder has besides its template."""

    template: str
    tool_use: str = ""
    """The template for requests with tools, if there is one."""
    in_config: bool = False
    """Whether the templates stand as a list in tokenizer_config.json."""
    bos: str = "<s>"
    ends: tuple[str, ...] = ("<|im_end|>",)
    """Tokens that end a turn; the first is eos_token."""
    adds: str = ""
    """What the tokenizer makes of a text $A with special tokens; empty: it adds none."""
    adds_in_config: tuple[str, ...] = ()
    """Ends that tokenizer_config.json says to add, which nobody does who has a tokenizer.json."""


KINDS = {
    "qwen3": Kind("qwen3"),
    "qwen3_coder": Kind("qwen3_coder"),
    "qwen36": Kind("qwen36"),
    "llama3": Kind(
        "llama3", bos="<|begin_of_text|>", ends=("<|eot_id|>", "<|eom_id|>"), adds="<|begin_of_text|> $A"
    ),
    "mistral": Kind("mistral", ends=("</s>",), adds="<s> $A </s>", adds_in_config=("bos",)),
    "glm45": Kind("glm45", ends=("<|endoftext|>", "<|user|>", "<|observation|>")),
    "smollm2": Kind("smollm2", bos="<|im_start|>"),
    "smollm3": Kind("smollm3"),
    "gemma3": Kind("gemma3", ends=("<end_of_turn>",), adds_in_config=("bos", "eos")),
    "hermes_files": Kind("hermes", "hermes_tool_use"),
    "hermes_list": Kind("hermes", "hermes_tool_use", in_config=True),
}

FOLDERS = [(kind, "byte_level") for kind in KINDS] + [
    (kind, TOKENIZERS[1 + at % 3]) for at, kind in enumerate(KINDS)
]
"""Each template with the tokenizer of most models, and with one of the others."""


@cache
def folder(kind: str, tokenizer: str) -> str:
    made = KINDS[kind]
    at = Path(mkdtemp(prefix=f"{kind}-{tokenizer}-"))
    backend = Tokenizer.from_str(_tokenizer(tokenizer).to_str())
    if made.adds:
        added = [(text, backend.token_to_id(text)) for text in made.adds.split() if text != "$A"]
        backend.post_processor = processors.TemplateProcessing(made.adds, None, added)
    backend.save(str(at / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": made.bos,
        "eos_token": made.ends[0],
        "unk_token": "<unk>",
    }
    config |= {f"add_{end}_token": True for end in made.adds_in_config}
    sources = {"default": _read(made.template)} | (
        {"tool_use": _read(made.tool_use)} if made.tool_use else {}
    )
    if made.in_config:
        config["chat_template"] = [{"name": name, "template": text} for name, text in sources.items()]
    else:
        (at / "chat_template.jinja").write_text(sources["default"], encoding="utf-8")
        if made.tool_use:
            (at / "additional_chat_templates").mkdir()
            (at / "additional_chat_templates" / "tool_use.jinja").write_text(
                sources["tool_use"], encoding="utf-8"
            )
    (at / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    ends = [backend.token_to_id(text) for text in made.ends]
    (at / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    # vLLM's renderer wants a model that it knows; nobody makes its weights
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 64)
    counts = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 32768}
    size = {"vocab_size": backend.get_vocab_size()}
    (at / "config.json").write_text(json.dumps(model | sizes | counts | size), encoding="utf-8")
    return str(at)


@cache
def renderer(kind: str, tokenizer: str) -> Renderer:
    return Renderer(folder(kind, tokenizer))


@cache
def transformers_tokenizer(kind: str, tokenizer: str) -> Any:
    return AutoTokenizer.from_pretrained(folder(kind, tokenizer))


def _read(template: str) -> str:
    paths = [at / f"{template}.jinja" for at in _TEMPLATES]
    return next(path for path in paths if path.exists()).read_text(encoding="utf-8")


@cache
def _tokenizer(name: str) -> Tokenizer:
    if name == "byte_level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = list(SPECIAL)
    else:
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=name, split=False)
        spaced = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        stripped = [] if name == "never" else [decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence([*spaced, *stripped])
        alphabet = []
        special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet) + 200,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
        max_token_length=12,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in _ADDED])
    return backend
