"""The format of a chat template is the one that reads back the calls which the template writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.models.pretrained.published import TOOLS_TEMPLATE
from tests.bench.dataplane.conversations import TEMPLATES
from tests.bench.dataplane.tokenizers import TEMPLATE

QWEN = """<tool_call>\n<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string or value is not iterable else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>"""
GLM = """<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>"""


def written(call: str, opening: str = "assistant\n") -> str:
    """A template that writes calls like this."""
    start, _, end = TEMPLATE.partition("<tool_call>")
    return start.rstrip() + call + end.partition("</tool_call>")[2].replace("assistant\n", opening)


def listed(call: str) -> str:
    separated = "{{ '[TOOL_CALLS][' if loop.first }}%s{{ ', ' if not loop.last else ']' }}"
    return written(separated % call)


CALL = "{{ call.function | tojson }}"
ARGUMENTS = "{{ call.function.arguments | tojson }}"
SOURCES = {
    "qwen3": ((TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8"), "hermes"),
    # it refuses several calls at once
    "llama3": ((TEMPLATES / "llama3.jinja").read_text(encoding="utf-8"), "llama3_json"),
    "smollm2-tools": (TOOLS_TEMPLATE, "hermes"),
    "of one line": (written(f"<tool_call>{CALL}</tool_call>"), "hermes"),
    "that opens thinking": (written(f"<tool_call>{CALL}</tool_call>", "assistant\n<think>\n"), "hermes"),
    "qwen3-coder": (written(QWEN), "qwen3_coder"),
    "glm": (written(GLM), "glm45"),
    "mistral, a list": (listed(CALL), "mistral_list"),
    "mistral": (written("[TOOL_CALLS]{{ call.function.name }}[ARGS]" + ARGUMENTS), "mistral"),
    "mistral, without a mark": (written("[TOOL_CALLS]{{ call.function.name }}" + ARGUMENTS), "mistral_named"),
    "that shows no calls": ((TEMPLATES / "chatml.jinja").read_text(encoding="utf-8"), ""),
    "with other tags": (written(f"<call>{CALL}</call>"), ""),
    "that loses an argument": (written("<tool_call>{{ call.function.name }}</tool_call>"), ""),
    "that writes arguments as a string": (
        written('<tool_call>{"name": "{{ call.function.name }}", "arguments": "x"}</tool_call>'),
        "",
    ),
    "that refuses an answer at the end": (
        "{{ raise_exception('whose turn?') if messages[-1].role == 'assistant' }}" + TEMPLATE,
        "hermes",
    ),
    "with a list around tags": (written(f"<calls><tool_call>{CALL}</tool_call>"), ""),
    "that refuses calls": (written("{{ raise_exception('no') }}"), ""),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_format_is_the_one_that_reads_back_what_the_template_writes(
    model_dir: str, tmp_path: Path, name: str
) -> None:
    source, tool_format = SOURCES[name]
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    assert Renderer(str(tmp_path)).tool_format == tool_format


def test_the_format_that_a_folder_names_counts(model_dir: str, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "tokenizer_config.json"
    for named in ("glm45", "plain"):
        config.write_text(
            json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"tool_format": named}),
            encoding="utf-8",
        )
        assert Renderer(str(tmp_path)).tool_format == named
    config.write_text(
        json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"tool_format": "xml"}), encoding="utf-8"
    )
    with pytest.raises(
        ValueError, match=r"tool_format in tokenizer_config\.json must be one of hermes, .*'xml'"
    ):
        Renderer(str(tmp_path))
