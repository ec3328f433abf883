"""The environment `prompts`: lines of a file as tasks, and what is wrong with a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.environments.prompts import Prompts


def test_each_line_is_a_task_with_its_messages(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "Hello"}\n\n'
        '{"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "x"}]}\n',
        encoding="utf-8",
    )
    prompts = Prompts(file=str(file))
    assert len(prompts) == 2
    assert prompts.tasks("holdout", 0).metadata == {"messages": [{"role": "user", "content": "Hello"}]}
    assert [message["role"] for message in prompts.tasks("holdout", 1).metadata["messages"]] == [
        "system",
        "user",
    ]
    with pytest.raises(ValueError, match="has 2 prompts; index 2 does not exist"):
        prompts.tasks("holdout", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt"', "line 2: not valid JSON"),
        ('{"prompt": 3}', 'line 1: expected {"prompt": TEXT} or {"messages": [...]}'),
        ('{"messages": []}', "line 1: expected"),
        ('["a"]', "line 1: expected"),
        ('{"messages": ["hi"]}', "line 1: expected"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as refused:
        len(Prompts(file=str(file)))
    assert f"{file}, {message}" in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.jsonl: cannot be read: No such file or directory"):
        len(Prompts(file=str(tmp_path / "none.jsonl")))


def test_a_file_that_changed_and_one_without_prompts_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n', encoding="utf-8")
    named = Prompts(file=str(file), sha256=Prompts(file=str(file)).digest)
    assert len(named) == 1
    file.write_text('{"prompt": "b"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="the SHA-256 of the file differs from the setting sha256"):
        len(Prompts(file=str(file), sha256=named.sha256))
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no prompts"):
        len(Prompts(file=str(file)))
