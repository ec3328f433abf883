"""What an answer with a schema may be: thinking where the template has it, then content or a call."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sf_core.dataplane.chat.answer_grammar import MAX_SCHEMA_BYTES, answer_grammar
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.engines.grammar import GrammarState, Vocabulary, find_forbidden
from tests.bench.dataplane.planes import CALC
from tests.bench.dataplane.tools import make_special

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["sum"],
    "additionalProperties": False,
}
CONTENT = '{"sum": 42}'
CALLS = {
    "hermes": '<tool_call>\n{"name": "calc", "arguments": {"expression": "1+1"}}\n</tool_call>',
    "llama3_json": '{"name": "calc", "parameters": {"expression": "1+1"}}',
    "plain": "<tool_call>calc 1+1</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=calc>\n<parameter=expression>\n1+1\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm45": "<tool_call>calc\n<arg_key>expression</arg_key>\n<arg_value>1+1</arg_value>\n</tool_call>",
    "mistral": '[TOOL_CALLS]calc[ARGS]{"expression": "1+1"}',
    "mistral_list": '[TOOL_CALLS][{"name": "calc", "arguments": {"expression": "1+1"}}]',
}
THINKS = "{{ '</think>' if false }}"
OPENS = "{{ '<think>\n' if add_generation_prompt }}"


@pytest.fixture
def made(tmp_path: Path, model_dir: str) -> Any:
    def make(tool_format: str = "hermes", more: str = "") -> Renderer:
        folder = tmp_path / "policy"
        shutil.copytree(model_dir, folder)
        template = folder / "chat_template.jinja"
        template.write_text(template.read_text(encoding="utf-8") + more, encoding="utf-8")
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config | {"tool_format": tool_format}), encoding="utf-8"
        )
        return Renderer(str(folder))

    return make


def follows(renderer: Renderer, text: str, *, schema: Any = SCHEMA, tools: Any = ()) -> bool:
    """Whether an answer may be this text and end there."""
    tokenizer = Path(renderer.model_dir, "tokenizer.json").read_text(encoding="utf-8")
    stop = renderer.stop_token_ids[0]
    grammar = answer_grammar(schema, [*tools], renderer)
    state = GrammarState(Vocabulary(tokenizer, renderer.stop_token_ids), grammar, ())
    for token in renderer.encode(text).tolist():
        if find_forbidden([state], renderer.num_ids)[0, token]:
            return False
        state.advance([token])
    return not find_forbidden([state], renderer.num_ids)[0, stop]


def test_content_is_json_of_the_schema_on_one_line(made: Any) -> None:
    renderer = made()
    for good in (CONTENT, '{"sum":-3,"name":"naïve \\" 数"}', '{"sum": 1, "name": ""}'):
        assert follows(renderer, good)
    for bad in (
        "42",
        '{"sum": "42"}',
        '{"name": "x"}',
        '{"sum": 1, "other": 2}',
        '{"sum":  1}',
        '{\n"sum": 1}',
    ):
        assert not follows(renderer, bad)
    assert not follows(renderer, CONTENT + " and more") and not follows(renderer, CONTENT[:-1])
    assert not follows(renderer, "<think>so</think>" + CONTENT)


def test_any_json_follows_an_empty_schema(made: Any) -> None:
    renderer = made()
    for schema in ({}, True):
        for text in ("42", '"text"', "null", '[1, {"a": [true]}]'):
            assert follows(renderer, text, schema=schema)
    assert not follows(renderer, "text", schema={})
    assert follows(renderer, '{"any": [1]}', schema={"type": "object"})
    assert not follows(renderer, "[1]", schema={"type": "object"})


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("tool_format", CALLS)
def test_a_tool_may_be_called_instead_if_the_request_has_it(
    made: Any, tool_format: str, special: bool
) -> None:
    renderer = made(tool_format)
    if special:
        make_special(Path(renderer.model_dir, "tokenizer.json"))
        renderer = Renderer(renderer.model_dir)
    call = CALLS[tool_format]
    assert follows(renderer, call, tools=[CALC]) and follows(renderer, CONTENT, tools=[CALC])
    assert not follows(renderer, call)
    assert not follows(renderer, call.replace("calc", "other"), tools=[CALC])
    # content whose first property is called as that of a call
    named = {"type": "object", "properties": {"name": {"const": "x"}}, "additionalProperties": False}
    assert follows(renderer, '{"name": "x"}', schema=named, tools=[CALC])
    assert not follows(renderer, '{"name": "y"}', schema=named, tools=[CALC])


@pytest.mark.parametrize("as_tokens", [False, True])
def test_an_answer_may_think_first_where_the_template_has_thinking(
    made: Any, model_dir: str, tmp_path: Path, as_tokens: bool
) -> None:
    def renderer_of(more: str) -> Renderer:
        shutil.rmtree(tmp_path / "policy", ignore_errors=True)
        renderer: Renderer = made(more=more)
        if as_tokens:
            file = tmp_path / "policy" / "tokenizer.json"
            content = json.loads(file.read_text(encoding="utf-8"))
            number = 1 + max(token["id"] for token in content["added_tokens"])
            like = content["added_tokens"][-1]
            for i, mark in enumerate(("<think>", "</think>")):
                content["added_tokens"].append(like | {"id": number + i, "content": mark})
            file.write_text(json.dumps(content), encoding="utf-8")
            renderer = Renderer(str(tmp_path / "policy"))
        assert ("<think>" in renderer.control_tokens) == as_tokens
        return renderer

    may = renderer_of(THINKS)
    assert follows(may, CONTENT)
    assert follows(may, f"<think>\n{{so}} it is\n</think>\n\n{CONTENT}")
    assert follows(may, f"<think></think>{CALLS['hermes']}", tools=[CALC])
    assert not follows(may, "<think>for ever") and not follows(may, "<think>x</think>\n\n\n\n" + CONTENT)
    must = renderer_of(THINKS + OPENS)
    assert follows(must, f"so it is</think>\n\n{CONTENT}") and follows(must, f"</think>{CONTENT}")
    assert not follows(must, CONTENT)


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"$ref": "#/none"}, "Pointer '/none' does not exist"),
        ({"type": "string", "pattern": "("}, "regex parse error: ( ^ error: unclosed group"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "Unsatisfiable schema: minimum (3) is greater"),
        (False, "Unsatisfiable schema: schema is false"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(
    made: Any, schema: Any, fault: str
) -> None:
    with pytest.raises(ApiError) as refused:
        answer_grammar(schema, [], made())
    assert refused.value.status == 400
    assert refused.value.message.startswith(f"The schema of the answer cannot be used: {fault}")
    assert "\n" not in refused.value.message


def test_a_schema_has_a_size(made: Any) -> None:
    with pytest.raises(ApiError, match=f"has 65550 bytes; the limit is {MAX_SCHEMA_BYTES} bytes"):
        answer_grammar({"const": "x" * (MAX_SCHEMA_BYTES + 2)}, [], made())
