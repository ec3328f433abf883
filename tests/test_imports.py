from __future__ import annotations

from pathlib import Path

import pytest

from tests.imports import find_faults, find_faults_of_tests

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


MODULES = ("bench/planes", "bench/runs", "cli/helpers", "cli/test_push", "storage/test_files")


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        (
            "from tests.bench import planes, runs\nfrom tests.bench.runs import make, commit\n",
            "imports 4 names of",
        ),
        (
            "from tests.bench.planes import say\nfrom tests.bench import runs\nimport tests.cli.helpers\n",
            None,
        ),
        ("from tests.cli.test_push import pushed\n", "imports tests.cli.test_push: move what both"),
        ("from tests.cli import test_push\n", "imports tests.cli.test_push: move what both"),
        (
            "def late():\n    from tests.storage.test_files import files\n",
            "imports tests.storage.test_files: move",
        ),
        (
            "from tests.storage.samples import DATA\n",
            "imports tests.storage.samples of another folder: move it into",
        ),
    ],
)
def test_tests_share_few_helpers_and_these_in_one_place(
    tmp_path: Path, imports: str, expected: str | None
) -> None:
    for name in MODULES:
        file = tmp_path / "tests" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="utf-8")
    (tmp_path / "tests" / "cli" / "test_serve.py").write_text(imports, encoding="utf-8")
    found = [*find_faults_of_tests(tmp_path)]
    assert len(found) == (expected is not None)
    assert all(sentence.startswith(f"tests/cli/test_serve.py {expected}") for sentence in found)
