from pathlib import Path

import pytest

from sf_core.settings import load_object


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "import json\n\nlimit = json.limit",
            "AttributeError: module 'json' has no attribute 'limit', FILE line 3",
        ),
        ("\nlimit = LIMIT\n", "NameError: name 'LIMIT' is not defined, FILE line 2"),
        # not the line of pathlib
        (
            "import pathlib\npathlib.Path('missing.txt').read_text()",
            "FileNotFoundError: [Errno 2] No such file or directory: 'missing.txt', FILE line 2",
        ),
        ("def tasks(:", "SyntaxError: invalid syntax (broken.py, line 1)"),
    ],
)
def test_what_a_users_module_raises_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken.py").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as refused:
        load_object("broken:tasks")
    expected = sentence.replace("FILE", str(tmp_path / "broken.py"))
    assert str(refused.value) == f"broken:tasks: cannot import broken: {expected}"


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^sys:path: expected a function, got list$"):
        load_object("sys:path")
