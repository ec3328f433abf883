"""Folders that cannot be trained are refused before anything starts, and others say what they can do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from sf_core.cli.explain import explain_plan
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from sf_core.training.policy_folder import SAMPLING, check_model_folder, describe_policy, read_model_config
from storage.run_directory import RunDirectory
from tests.bench import started
from tests.bench.refusals import check_sentence
from tests.bench.training.images import multimodal_policy


def rewrite(file: Path, **facts: Any) -> None:
    file.write_text(
        json.dumps((json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}) | facts),
        encoding="utf-8",
    )


def be(**facts: Any) -> Callable[[Path], None]:
    return lambda model: rewrite(model / "config.json", **facts)


def also(name: str) -> Callable[[Path], None]:
    return lambda model: rewrite(model / name)


def only(name: str) -> Callable[[Path], None]:
    def leave(model: Path) -> None:
        for file in model.iterdir():
            file.unlink()
        (model / name).write_bytes(b"{}")

    return leave


def as_policy_of_a_run(model: Path) -> None:
    files = list(model.iterdir())
    (model / "policy").mkdir()
    for file in files:
        file.rename(model / "policy" / file.name)
    (model / "config.json").write_text('{"run_id": "r"}', encoding="utf-8")


def as_codes(dtype: torch.dtype) -> Callable[[Path], None]:
    def store(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        save_file({name: tensor.to(dtype) for name, tensor in weights.items()}, model / "model.safetensors")

    return store


def with_channels(model: Path) -> None:
    """A template after gpt-oss's."""
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}"
        "<|message|>{{ m.content }}<|im_end|>{% endfor %}<|start|>assistant",
        encoding="utf-8",
    )


def with_end(end: str) -> Callable[[Path], None]:
    return lambda model: rewrite(model / "tokenizer_config.json", eos_token=end)


NOT_ADDED = " of tokenizer_config.json is not among the added tokens of tokenizer.json"
ADAPTER = " contains an adapter (adapter_config.json): set policy.model to the folder of the base model"
FULL = "; training needs unquantised weights: name the folder of the original model"
CAUSAL = ": name a folder of a causal language model (...ForCausalLM in its config.json)"

UNTRAINABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "GPTQ": (be(quantization_config={"quant_method": "gptq", "bits": 4}), f"quantised (gptq){FULL}"),
    "AWQ": (be(quantization_config={"quant_method": "awq"}), f"quantised (awq){FULL}"),
    "bitsandbytes": (
        be(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        f"quantised (bitsandbytes){FULL}",
    ),
    "FP8": (be(quantization_config={"quant_method": "fp8"}), f"quantised (fp8){FULL}"),
    "within": (be(text_config={"quantization_config": {"quant_method": "fp8"}}), f"quantised (fp8){FULL}"),
    "old compressed-tensors": (
        be(compression_config={"format": "x"}),
        "quantised (`compression_config` in config.json)",
    ),
    "MLX": (be(quantization={"bits": 4}), "quantised (`quantization` in config.json)"),
    "old GPTQ": (also("quantize_config.json"), f"quantised (quantize_config.json){FULL}"),
    "ModelOpt": (also("hf_quant_config.json"), "quantised (hf_quant_config.json)"),
    "FP8 that is not named": (as_codes(torch.float8_e4m3fn), f"quantised (F8_E4M3){FULL}"),
    "codes that are not named": (as_codes(torch.uint8), f"quantised (U8){FULL}"),
    "channels": (
        with_channels,
        ": its chat template writes channels (<|channel|>, as that of gpt-oss), which SeamlessFlow does not",
    ),
    "an end that is an ordinary entry": (with_end("e"), f": eos_token 'e'{NOT_ADDED}"),
    "an end that is no entry": (with_end("</s>"), f": eos_token '</s>'{NOT_ADDED}"),
    "a GGUF file": (only("small.gguf"), "contains a GGUF file: `sf model "),
    "a run": (as_policy_of_a_run, " is the directory of a run: set policy.model to "),
    "adapter": (only("adapter_config.json"), ADAPTER),
    "adapter beside a model": (also("adapter_config.json"), ADAPTER),
    "encoder": (be(architectures=["BertModel"]), f" is BertModel, which does not generate text{CAUSAL}"),
    "masked": (be(architectures=["BertForMaskedLM"]), " is BertForMaskedLM, which does not generate text"),
    "embedding": (be(architectures=["Qwen3Model"]), " is Qwen3Model, which does not generate text"),
    "reward": (
        be(architectures=["LlamaForSequenceClassification"]),
        " is LlamaForSequenceClassification, which does not generate text",
    ),
    "for images too": (
        be(architectures=["Qwen3VLForConditionalGeneration"], model_type="qwen3_vl"),
        " is Qwen3VLForConditionalGeneration, which is not a causal language model in transformers" + CAUSAL,
    ),
    "encoder and decoder": (
        be(architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True),
        f" is T5ForConditionalGeneration, an encoder-decoder model{CAUSAL}",
    ),
}


@pytest.mark.parametrize("place", ["plan", "check", "start"])
@pytest.mark.parametrize("kind", UNTRAINABLE)
def test_a_folder_that_cannot_be_trained_is_refused_in_one_sentence(
    tmp_path: Path, policy_copy: Path, kind: str, place: str
) -> None:
    make, sentence = UNTRAINABLE[kind]
    make(policy_copy)
    run = RunDirectory(str(tmp_path / "r"))
    config = started.from_model(run, policy_copy)
    refuse = {"plan": lambda: explain_plan(config), "check": lambda: preflight(Facts(config))}
    with pytest.raises(ValueError) as refused:
        refuse.get(place, lambda: started.started(run))()
    check_sentence(str(refused.value), "policy.model: ", str(policy_copy), sentence)
    assert not Path(run.start_dir).exists()


def test_every_causal_language_model_of_transformers_may_be_trained() -> None:
    known = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if not name.endswith(SAMPLING)}
    assert known <= {"BertGenerationDecoder"}
    for others in (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ):
        assert not any(name.endswith(SAMPLING) for name in others.values())


def test_a_model_for_images_that_transformers_has_as_a_causal_one_may_be_trained(policy_copy: Path) -> None:
    layers = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    text = layers | {"vocab_size": 60, "head_dim": 16, "num_key_value_heads": 1}
    sizes = {"text_config": text, "vision_config": layers, "image_token_index": 59}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3", **sizes)).save_pretrained(policy_copy)
    assert read_model_config(str(policy_copy))["architectures"] == ["Gemma3ForConditionalGeneration"]
    check_model_folder(str(policy_copy))


@pytest.fixture
def base_model(policy_copy: Path) -> Path:
    """One whose folder names another end of turns than its template."""
    tokenizer = Tokenizer.from_file(str(policy_copy / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(policy_copy / "tokenizer.json"))
    rewrite(policy_copy / "tokenizer_config.json", eos_token="<|endoftext|>")
    rewrite(
        policy_copy / "generation_config.json", eos_token_id=tokenizer.token_to_id("<|endoftext|>"), top_k=20
    )
    return policy_copy


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, 'arguments': "
    "c.function.arguments} | tojson }}</tool_call>{% endfor %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
# written after Gemma 4's and Kimi-K2's
GEMMA_4 = LOOP + "{% if m.role == 'system' %}{{ m.content }}{% else %}" + PARTS + "{% endif %}" + END
SAID = "{{ m.content or '' }}"
KIMI_K2 = (
    TOOLS + LOOP + "{% if m.role == 'user' %}" + PARTS + "{% else %}" + SAID + "{% endif %}" + CALLS + END
)
AS_LIST = "its chat template writes the text of some messages ({}) as a Python list"
# written after Qwen3's, Qwen3.5's and Mistral-Nemo's
THINKS = (
    "{% if m.reasoning_content and loop.index0 > at.last %}<think>\n{{ m.reasoning_content }}\n</think>\n"
    "{% endif %}"
)
QWEN_3 = (
    "{% set at = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set at.last = loop.index0 %}{% endif %}{% endfor %}" + f"{TOOLS}{LOOP}{THINKS}{SAID}{CALLS}{END}"
)
QWEN_35 = QWEN_3.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
NEMO = (
    "{% for m in messages if m.role != 'system' %}{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + END
)
PLAIN = f"{TOOLS}{LOOP}{SAID}{CALLS}{END}"


@pytest.mark.parametrize(
    ("template", "facts", "lists"),
    [
        (GEMMA_4, [], "system"),
        (KIMI_K2, ["user turns: one row"], "system, assistant, assistant with a call"),
        (PLAIN, ["user turns: one row", "tool turns: one row"], ""),
        (
            QWEN_3,
            ["user turns: a row each after an answer with reasoning", "tool turns: one row"],
            "",
        ),
        (QWEN_35, ["user turns: a row each", "tool turns: one row"], ""),
        (NEMO, ["user turns: a row each"], ""),
    ],
)
def test_it_is_said_what_a_template_does_with_messages(
    policy_copy: Path, template: str, facts: list[str], lists: str
) -> None:
    (policy_copy / "chat_template.jinja").write_text(template, encoding="utf-8")
    check_model_folder(str(policy_copy))
    said = describe_policy(str(policy_copy)).split("; ")
    assert set(facts) <= set(said)
    assert [one for one in said if "Python list" in one] == (
        [
            f"{AS_LIST.format(lists)}, [{{'type': 'text', ...}}], here and in vLLM, which its base model has "
            "never seen"
        ]
        if lists
        else []
    )


def test_a_template_for_requests_with_tools_alone_shows_them(policy_copy: Path) -> None:
    refusal = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}"
    (policy_copy / "chat_template.jinja").write_text(refusal + PLAIN, encoding="utf-8")
    assert "its chat template shows tools, and calls are read as plain" in describe_policy(str(policy_copy))


def test_a_multimodal_policy_has_the_names_that_qwen_gives(tmp_path: Path) -> None:
    folder = multimodal_policy(str(tmp_path))
    check_model_folder(folder)
    file = f"{folder}/model.safetensors"
    published = load_file(file)
    for begin, other, missing in (
        ("model.", "model.language_model.", "model.embed_tokens.weight"),
        ("visual.", "model.visual.", "visual.patch_embed.proj.weight"),
    ):
        named = {re.sub(f"^{re.escape(begin)}", other, name): tensor for name, tensor in published.items()}
        save_file(named, file)
        with pytest.raises(ValueError) as raised:
            check_model_folder(folder)
        check_sentence(str(raised.value), f"{folder} has no {missing}", f"{other}* to {begin}*")


def test_a_multimodal_policy_attends_and_turns_as_it_is_trained(tmp_path: Path) -> None:
    folder = multimodal_policy(str(tmp_path))
    shape = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    stretched = {"rope_type": "dynamic", "factor": 2.0}
    for text in (
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8},
        {"rope_parameters": shape["text_config"]["rope_parameters"] | stretched},
    ):
        rewrite(tmp_path / "config.json", text_config=shape["text_config"] | text)
        with pytest.raises(ValueError) as raised:
            check_model_folder(folder)
        check_sentence(str(raised.value), f"{folder} uses sliding windows", "rope_scaling")


def test_the_end_that_only_the_template_says_is_planned_and_named_in_the_start_folder(
    tmp_path: Path, base_model: Path
) -> None:
    sentence = "its chat template ends turns with <|im_end|>, so answers end there too"
    assert sentence in describe_policy(str(base_model))
    run = RunDirectory(str(tmp_path / "r"))
    started.from_model(run, base_model)
    started.started(run)
    named = json.loads(Path(run.start_dir, "generation_config.json").read_text(encoding="utf-8"))
    renderer = open_renderer(run.start_dir)
    # a server of the trained policy takes its ends from there
    assert (tuple(named["eos_token_id"]), named["top_k"]) == (renderer.stop_token_ids, 20)
    assert renderer.stop_token_ids == open_renderer(str(base_model)).stop_token_ids
    assert len(renderer.stop_token_ids) == 2 and sentence not in describe_policy(run.start_dir)
    # its files are those of the manifest
    started.started(run)
