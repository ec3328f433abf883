"""README and docs/benchmarks.md show the stored figures, and only figures of a commit are stored."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import COMMANDS, RESULTS, commit_of, keep, last_line
from benchmarks.table import FIGURES, PAGE, README, ROWS, SECTIONS, figures, in_readme, page

REMEDY = "run python -m benchmarks.table"
MADE = ("README.md", "docs/benchmarks.md", "benchmarks/results/storage.json")

STORED = {
    "command": "python -m benchmarks.orchestration",
    "commit": "0123456789abcdef",
    "date": "2026-11-22T10:00:00+00:00",
    "machine": {"cores": 2, "memory_gib": 24, "python": "3.11.2", "torch": "2.13.0"},
    "line": {
        "orchestration_seconds_per_iteration": 0.876,
        "baseline_plain_prefect_seconds_per_iteration": 1.1,
    },
}


def store(folder: Path, **changes: Any) -> Path:
    (folder / "orchestration.json").write_text(json.dumps(STORED | changes), encoding="utf-8")
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for path in ("code.py", *MADE):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("first", encoding="utf-8")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e@e", "commit", "--quiet", "-m", "first")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout.strip()


def test_readme_and_the_page_are_made_from_the_results() -> None:
    assert README.read_text(encoding="utf-8") == in_readme(README.read_text(encoding="utf-8"), figures()), (
        REMEDY
    )
    assert PAGE.read_text(encoding="utf-8") == page(), REMEDY


def test_every_row_and_every_file_is_that_of_a_benchmark() -> None:
    assert {row.result for row in ROWS} == set(COMMANDS)
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(COMMANDS)
    kept = {
        file.stem: json.loads(file.read_text(encoding="utf-8"))["command"] for file in RESULTS.glob("*.json")
    }
    assert kept == {name: f"python -m {COMMANDS[name]}" for name in kept}


def test_a_figure_of_readme_links_to_the_section_that_has_its_benchmark() -> None:
    assert all(row.result in SECTIONS[part] for part, row in FIGURES.items())
    assert all(f"\n## {part}\n" in PAGE.read_text(encoding="utf-8") for part in FIGURES)


def test_a_row_shows_figures_command_date_and_commit(tmp_path: Path) -> None:
    lines = page(store(tmp_path)).splitlines()
    assert lines[lines.index("## Orchestration") + 4] == (
        "| seconds of overhead per iteration | 0.88 | 1.10, plain Prefect subflows "
        "| `benchmarks.orchestration` | 2026-11-22, 0123456 |"
    )
    assert lines[-1] == "On 2 CPU cores and 24 GiB, Python 3.11.2, torch 2.13.0."


def test_readme_shows_one_figure_and_one_baseline(tmp_path: Path) -> None:
    assert figures(store(tmp_path)).splitlines()[2:] == [
        "| [Orchestration](docs/benchmarks.md#orchestration) | seconds of overhead per iteration | 0.88 "
        "| 1.10, plain Prefect subflows |"
    ]


def test_rows_and_sections_without_results_are_left_out(tmp_path: Path) -> None:
    lines = page(store(tmp_path)).splitlines()
    assert [line for line in lines if line.startswith("## ")] == ["## Orchestration"]
    assert len([line for line in lines if line.startswith("| ")]) == 2


def test_a_result_without_the_figure_of_a_row_is_refused(tmp_path: Path) -> None:
    missing = "baseline_plain_prefect_seconds_per_iteration"
    with pytest.raises(ValueError, match=rf"orchestration\.json has no '{missing}'.* run python -m"):
        page(store(tmp_path, line={k: v for k, v in STORED["line"].items() if k != missing}))


def test_a_readme_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no part between"):
        in_readme("# SeamlessFlow", "| a |")


def test_what_stands_around_the_table_stays() -> None:
    readme = in_readme(
        "before\n<!-- from here: python -m benchmarks.table -->\n<!-- to here -->\nafter", "| a |"
    )
    assert readme == in_readme(readme, "| a |")
    assert readme.startswith("before\n<!--") and readme.endswith("-->\nafter") and "\n| a |\n" in readme


def test_figures_are_of_the_commit_that_is_checked_out(repository: Path) -> None:
    (repository / "untracked").touch()
    assert commit_of(repository) == git(repository, "rev-parse", "HEAD")


def test_an_uncommitted_tree_is_not_measured(repository: Path) -> None:
    (repository / "code.py").write_text("second", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"^commit first, then measure: code\.py differ"):
        commit_of(repository)


def test_what_the_last_benchmark_left_does_not_hinder_the_next(repository: Path) -> None:
    for path in MADE:
        (repository / path).write_text("second", encoding="utf-8")
    assert commit_of(repository) == git(repository, "rev-parse", "HEAD")


def test_without_a_repository_nothing_is_measured(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"git status in .* failed: .*not a git repository"):
        commit_of(tmp_path)


def test_the_last_line_is_the_result() -> None:
    assert last_line("storage", 'progress\n{"rows": 1}\n') == {"rows": 1}


@pytest.mark.parametrize("output", ["", "no figures\n", "[1]\n"])
def test_a_benchmark_without_a_line_is_refused(output: str) -> None:
    with pytest.raises(SystemExit, match=r"storage: python -m benchmarks\.storage printed no JSON line"):
        last_line("storage", output)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Replaces the storage benchmark by a command that prints a file."""
    command = f"json.tool --compact {tmp_path / 'line.json'}"
    monkeypatch.setitem(COMMANDS, "storage", command)
    monkeypatch.setattr("benchmarks.results.commit_of", lambda root: "0123")
    return command


def test_a_benchmark_that_fails_leaves_nothing(tmp_path: Path, command: str) -> None:
    with pytest.raises(
        SystemExit, match=r"storage: python -m json\.tool .* failed with \d; nothing was kept"
    ):
        keep("storage", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_is_kept_with_commit_date_and_machine(tmp_path: Path, command: str) -> None:
    (tmp_path / "line.json").write_text('{"rows": 4}', encoding="utf-8")
    keep("storage", tmp_path)
    kept = json.loads((tmp_path / "storage.json").read_text(encoding="utf-8"))
    assert kept["line"] == {"rows": 4}
    assert (kept["command"], kept["commit"]) == (f"python -m {command}", "0123")
    assert datetime.fromisoformat(kept["date"]).utcoffset() == timedelta(0)
    assert kept["machine"]["cores"] >= 1
