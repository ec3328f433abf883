"""What a run leaves behind is opened as docs/data.md says, in a run that was trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.quickstart import CONFIG, ROOT, options, sf

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "data.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `sf train` was called, with runs/quickstart in it."""
    folder = tmp_path_factory.mktemp("data")
    done = sf(folder, "train", CONFIG, *options(run_id="quickstart", rollout__overlap=False))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_page_has_ten_queries() -> None:
    assert [int(number) for number in re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE)] == list(range(1, 11))


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_the_code_of_the_page_runs(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    exec(compile(SNIPPETS[number], f"docs/data.md, query {number + 1}", "exec"), {})
    shown = capsys.readouterr().out
    assert shown.strip() and "Empty DataFrame" not in shown and "(0, " not in shown and "0 rows" not in shown
