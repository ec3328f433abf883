from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sf_core.dataplane.chat.messages import Message
from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane import conversations


@pytest.mark.parametrize(
    ("name", "user_appends", "tool_appends"),
    [("chatml", True, True), ("llama3", True, True), ("qwen3", False, True)],
)
def test_probes_tell_what_a_template_appends(name: str, user_appends: bool, tool_appends: bool) -> None:
    renderer = conversations.family(name)
    assert renderer.is_append_only([conversations.user("a")]) == user_appends
    assert (
        renderer.is_append_only([{"role": "tool", "content": "r", "tool_call_id": "c"}] * 2) == tool_appends
    )


def changed(folder: Path, old: str, new: str) -> Renderer:
    """Renderer of ChatML with one change in the template."""
    shutil.copytree(conversations.family("chatml").model_dir, folder, dirs_exist_ok=True)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    return Renderer(str(folder))


@pytest.mark.parametrize(
    "insert",
    [
        "{% if messages | length < 4 %}short{% endif %}",
        "{{ messages | length }}",
        "{{ messages[-1].content }}",
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length > 9 %}long{% endif %}",
    ],
)
def test_a_template_that_looks_at_the_whole_conversation_is_always_given_it(
    tmp_path: Path, insert: str
) -> None:
    renderer = changed(tmp_path, "{% for", insert + "{% for")
    assert not renderer.is_append_only([conversations.user("a")])


def test_a_template_that_refuses_a_mere_opening_is_always_given_the_whole(tmp_path: Path) -> None:
    refusal = "{% if messages | length < 3 %}{{ raise_exception('too short') }}{% endif %}"
    renderer = changed(tmp_path, "{% for", refusal + "{% for")
    assert not renderer.is_append_only([conversations.user("a")])


def test_a_template_that_fails_on_a_probe_serves_what_it_can_render(tmp_path: Path) -> None:
    failure = "{% if messages[-1].role == 'tool' %}{{ 'a' + none }}{% endif %}"
    renderer = changed(tmp_path, "{% for", failure + "{% for")
    assert renderer.is_append_only([conversations.user("a")])


def test_a_template_that_fools_the_probes_is_found_out(tmp_path: Path) -> None:
    # more messages than any probe has
    renderer = changed(tmp_path, "{% for", "{% if messages | length > 100 %}long{% endif %}{% for")
    assert renderer.is_append_only([conversations.user("a")])
    record = conversations.Record(renderer)
    messages = list[Message]()
    for i in range(70):
        messages.append(conversations.user(f"q{i}"))
        prompt = record.session.open_prompt(messages, [], renderer)
        turn = record.answer(prompt, renderer.encode("said").tolist())
        messages.append(turn.message)
    assert record.session.branch_reasons == {"template_rewrote": 1}
    assert not renderer.is_append_only([conversations.user("a")])
    assert conversations.shown(renderer, prompt.full_ids().tolist()) == renderer.render(messages[:-1], [])
    conversations.check(record)
