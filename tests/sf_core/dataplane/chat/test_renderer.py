from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sf_core.dataplane.chat.renderer import Renderer, read_renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.turns.answer import TextStream
from tests.bench.dataplane.planes import CALC


def test_rendering_and_encoding_are_those_of_transformers(model_dir: str, renderer: Renderer) -> None:
    theirs = AutoTokenizer.from_pretrained(model_dir)
    messages = [{"role": "user", "content": "naïve 数学 <|im_end|>"}, {"role": "assistant", "content": "x"}]
    text = theirs.apply_chat_template(messages, tools=[CALC], add_generation_prompt=True, tokenize=False)
    assert renderer.render(messages, [CALC]) == text
    assert renderer.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "text", ["{{ 7 * 7 }}", "{% raise 'x' %}", "{{ messages.__class__ }}", "$(id) `id` %s"]
)
def test_text_of_a_request_is_no_program(renderer: Renderer, text: str) -> None:
    messages = [{"role": "user", "content": text}, {"role": "tool", "content": text, "tool_call_id": "c"}]
    assert renderer.render(messages, [CALC]).count(text) == 2


@pytest.mark.parametrize(
    ("config", "num_ids"),
    [
        ({"vocab_size": 2048}, 2048),
        ({"text_config": {"vocab_size": 4096}}, 4096),
        ({"vocab_size": 7}, 385),
        ({}, 385),
    ],
)
def test_a_network_may_sample_ids_that_its_tokenizer_does_not_know(
    model_dir: str, tmp_path: Path, config: dict[str, object], num_ids: int
) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    padded = Renderer(str(folder))
    assert (padded.num_ids, padded.vocab_size) == (num_ids, 385)


def test_the_data_plane_imports_neither_torch_nor_what_it_serves() -> None:
    code = "import sf_core.dataplane.server, sys; print([m for m in %r if m in sys.modules])"
    heavy = ["torch", "transformers", "dask", "distributed", "prefect"]
    done = subprocess.run(
        [sys.executable, "-c", code % heavy], capture_output=True, check=True, encoding="utf-8"
    )
    assert done.stdout.strip() == "[]"


@given(st.text(), st.data())
def test_streamed_text_is_the_whole_text(renderer: Renderer, text: str, data: st.DataObject) -> None:
    ids = renderer.encode(text).tolist()
    stream = TextStream(renderer)
    pieces = []
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        pieces.append(stream.push(ids[:count]))
        ids = ids[count:]
    pieces.append(stream.flush())
    assert "".join(pieces) == renderer.decode(renderer.encode(text).tolist())


@given(st.lists(st.integers(0, 399), max_size=30))
def test_streamed_ids_that_are_no_valid_text_lose_nothing(renderer: Renderer, ids: list[int]) -> None:
    stream = TextStream(renderer)
    assert "".join([*(stream.push([token]) for token in ids), stream.flush()]) == renderer.decode(ids)


def test_a_character_is_never_sent_in_halves(renderer: Renderer) -> None:
    stream = TextStream(renderer)
    pieces = [stream.push([token]) for token in renderer.encode("ß数€").tolist()]
    assert [piece for piece in pieces if piece] == ["ß", "数", "€"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
        (lambda folder: _set(folder / "tokenizer_config.json", "eos_token", None), "has no eos_token"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_with_a_sentence(
    model_dir: str, tmp_path: Path, change: object, sentence: str
) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    change(tmp_path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=sentence):
        Renderer(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("tokenizer.json", "{", ": tokenizer or template is broken: Exception: EOF while parsing an object"),
        ("tokenizer_config.json", "{", "/tokenizer_config.json cannot be read: Expecting property name"),
        (
            "chat_template.jinja",
            "{% if %}",
            ": tokenizer or template is broken: TemplateSyntaxError: Expected an expression",
        ),
        (
            "chat_template.jinja",
            "</think>{{ raise_exception('no') }}",
            ": tokenizer or template is broken: TemplateError: no",
        ),
        ("generation_config.json", "[]", "/generation_config.json cannot be read: it must be a JSON object"),
    ],
)
async def test_a_folder_with_a_broken_file_is_refused_and_named(
    model_dir: str, tmp_path: Path, file: str, text: str, sentence: str
) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(ApiError) as refused:
        await read_renderer(str(tmp_path))
    assert refused.value.message.startswith(f"{tmp_path}{sentence}")
    assert (refused.value.status, refused.value.param) == (400, "model_dir")


async def test_a_template_that_fails_on_messages_refuses_them_and_serves_others(
    model_dir: str, tmp_path: Path
) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    # as templates of reasoning models do with answers that have none
    shown = "{% for m in messages %}{{ m.content + (m.reasoning_content or none) }}<|im_end|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(shown, encoding="utf-8")
    renderer = await read_renderer(str(tmp_path))
    assert renderer.render([{"role": "user", "content": "a", "reasoning_content": "b"}], []) == "ab<|im_end|>"
    with pytest.raises(jinja2.TemplateError, match="TypeError: can only concatenate str"):
        renderer.render([{"role": "user", "content": "a"}], [])


def test_the_date_of_a_template_does_not_change_while_sessions_run(model_dir: str, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}", encoding="utf-8"
    )
    renderer = Renderer(str(tmp_path))
    assert renderer.render([], []) == renderer.render([], [])


def test_every_end_token_of_the_generation_settings_ends_a_turn(model_dir: str, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 1]}', encoding="utf-8")
    assert Renderer(str(tmp_path)).stop_texts == {0: "<|im_start|>", 1: "<|im_end|>"}


def test_text_behind_an_end_of_turn_that_is_an_ordinary_token_is_encoded_alone(renderer: Renderer) -> None:
    assert len(renderer.encode("the")) == 1  # together they are one token
    assert renderer.encode("he", after="t").tolist() == renderer.encode("he").tolist()
    assert renderer.encode("he", after="<|im_end|>").tolist() == renderer.encode("he").tolist()


def _set(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {key: value}), encoding="utf-8")
