"""The token with which a template ends a turn counts as an end, also if the folder names another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane.conversations import family, user

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} </s>"
    "{% else %}<s>[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GRANITE = (
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
# the last answer of a conversation ends otherwise than those before it: `<|end|>` ends the parts of an answer
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' and not add_generation_prompt %}<|return|>"
    "{% else %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ 'Assistant' if m.role == 'assistant' else 'Human' }}: {{ m.content }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
SEPARATED = "{% for m in messages %}{{ m.content }}{% if not loop.last %}<|sep|>{% endif %}{% endfor %}"
STRICT = (
    "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    "{{ messages[0].content }}"
)
LINES = CHATML.replace("<|im_end|>", "\n<|im_end|>")

TOKENS = [
    *(
        "<|endoftext|>",
        "<|im_end|>",
        "<s>",
        "</s>",
        "<|eot_id|>",
        "<|end_of_text|>",
        "<eos>",
        "<end_of_turn>",
    ),
    *("<|user|>", "<|assistant|>", "<|end|>", "<|return|>", "<|start|>", "<|sep|>", "<|im"),
]


def renderer_of(folder: Path, template: str, ends: list[str], tokens: list[str]) -> Renderer:
    """The renderer of a folder whose tokenizer has these added tokens. The tokenizer names the first end, and
    the generation settings name all."""
    shutil.copytree(family("chatml").model_dir, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text) for text in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": ends[0]}), encoding="utf-8")
    ids = [tokenizer.token_to_id(end) for end in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    return Renderer(str(folder))


@pytest.mark.parametrize(
    ("template", "ends", "found"),
    [
        pytest.param(CHATML, ["<|endoftext|>"], "<|im_end|>", id="ChatML, base"),
        pytest.param(CHATML, ["<|im_end|>"], None, id="ChatML"),
        pytest.param(CHATML, ["<|endoftext|>", "<|im_end|>"], None, id="ChatML, by its generation settings"),
        pytest.param(LINES, ["<|endoftext|>"], "<|im_end|>", id="ChatML with a line before the end"),
        pytest.param(LLAMA_2, ["</s>"], None, id="Llama 2"),
        pytest.param(LLAMA_2, ["<|endoftext|>"], "</s>", id="Llama 2 with another end"),
        pytest.param(LLAMA_3, ["<|end_of_text|>"], "<|eot_id|>", id="Llama 3, base"),
        pytest.param(LLAMA_3, ["<|eot_id|>"], None, id="Llama 3"),
        pytest.param(GEMMA, ["<eos>"], "<end_of_turn>", id="Gemma, base"),
        pytest.param(GEMMA, ["<eos>", "<end_of_turn>"], None, id="Gemma"),
        pytest.param(GRANITE, ["<|end_of_text|>"], None, id="Granite"),
        pytest.param(GLM, ["<|endoftext|>", "<|user|>"], None, id="GLM"),
        pytest.param(GLM, ["<|endoftext|>"], None, id="GLM without its generation settings"),
        pytest.param(HARMONY, ["<|return|>"], None, id="harmony"),
        pytest.param(HARMONY, ["<|endoftext|>"], None, id="harmony with another end"),
        pytest.param(PLAIN, ["<|endoftext|>"], None, id="plain text"),
        pytest.param(SEPARATED, ["<|endoftext|>"], None, id="separated"),
        pytest.param(STRICT, ["<|endoftext|>"], None, id="one that refuses the probe"),
    ],
)
def test_the_end_of_a_turn_is_found_and_nothing_else_is(
    tmp_path: Path, template: str, ends: list[str], found: str | None
) -> None:
    renderer = renderer_of(tmp_path, template, ends, TOKENS)
    assert renderer.template_stop == found
    assert {*renderer.stop_texts.values()} == {*ends} | ({found} if found else set())
    assert renderer.stop_token_ids == tuple(renderer.stop_texts)


def test_what_is_several_tokens_is_no_end(tmp_path: Path) -> None:
    template = CHATML.replace("<|im_end|>", "<|over|>")
    assert renderer_of(tmp_path, template, ["<|endoftext|>"], TOKENS).template_stop is None


def test_an_end_that_the_tokenizer_does_not_know_is_none(tmp_path: Path) -> None:
    known = renderer_of(tmp_path, CHATML, ["<|im_end|>"], TOKENS).stop_texts
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [*known, 10**6]}), encoding="utf-8"
    )
    assert Renderer(str(tmp_path)).stop_texts == known


def test_what_follows_an_answer_that_ended_as_the_template_says_is_cut_behind_it(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, CHATML, ["<|endoftext|>"], TOKENS)
    messages = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    prompt = renderer.render(messages[:1], [])
    rest = renderer.render(messages, []).removeprefix(prompt)
    end = next(token for token, text in renderer.stop_texts.items() if text == "<|im_end|>")
    suffix = "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.suffix_after_turn(rest, end) == suffix
