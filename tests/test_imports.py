from __future__ import annotations

from pathlib import Path

import pytest

from tests.imports import find_faults

ALONE = "import json\n"
LATER = "def late():\n    from {name}.b import two\n"
FOR_TYPES = (
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import json\n    from {name}.b import Two\n"
)


@pytest.mark.parametrize(
    ("name", "top", "a", "b", "expected"),
    [
        ("apart", "", "from {name} import b\n", ALONE, []),
        (
            "round",
            "",
            LATER,
            "from {name}.a import one\n",
            ["imports form a circle: round.a <- round.b <- round.a"],
        ),
        (
            "above",
            "from {name}.a import one\n",
            "import {name}\n",
            ALONE,
            ["imports form a circle: above <- above.a <- above"],
        ),
        (
            "types",
            "",
            FOR_TYPES,
            ALONE,
            ["types.a imports types.b under TYPE_CHECKING: import it as usual, without a circle"],
        ),
    ],
)
def test_circles_and_hidden_imports_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, top: str, a: str, b: str, expected: list[str]
) -> None:
    package = f"imports_{name}"
    (tmp_path / package).mkdir()
    for file, source in (("__init__", top), ("a", a), ("b", b)):
        (tmp_path / package / f"{file}.py").write_text(source.format(name=package), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(find_faults([package]))
    assert [sentence.replace("imports_", "") for sentence in found] == expected
