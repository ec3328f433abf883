"""The tables of docs/reference name every column of our files, and the queries of reading.md show iterations
in order. tests/e2e/test_data.py runs all code of these pages."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from storage.run_directory import RunDirectory
from storage.tables.batches import BATCH_SCHEMA, write_batch
from storage.tables.judgements import SCHEMA as JUDGEMENTS
from storage.tables.metrics import write_metrics
from storage.tables.outcomes import SCHEMA as OUTCOMES
from storage.tables.outcomes import write_outcomes
from storage.tables.parquet import SCHEMA_VERSION
from storage.tables.schema import MULTIMODAL_SCHEMA, SCHEMA, TURN
from storage.tables.scores import SCHEMA as SCORES
from storage.tables.trajectories import read_trajectories, write_trajectories
from tests.bench import runs

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
READING = (PAGES / "reading.md").read_text(encoding="utf-8")
QUERIES = dict(
    (part.split("\n", 1)[0].strip("# "), part.split("```python\n", 1)[1].split("```", 1)[0])
    for part in re.split(r"^(?=##+ )", READING, flags=re.MULTILINE)
    if "```python\n" in part
)
"""Code of reading.md by its heading."""


def documented(page: str, section: str, header: str) -> dict[str, str]:
    """Types by name in one table of a page."""
    _, text = (PAGES / f"{page}.md").read_text(encoding="utf-8").split(f"\n## {section}\n")
    _, table = text.split(f"| {header} | type | meaning |\n|---|---|---|\n", 1)
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", table.split("\n\n")[0], re.MULTILINE)
    return {
        name: kind.strip("`")
        for names, kinds in rows
        for name, kind in zip(re.findall(r"`(\w+)`", names), [kinds] * 9, strict=False)
    }


def types(schema: pa.Schema) -> dict[str, str]:
    shown = {field.name: str(field.type) for field in schema}
    return {
        name: "list<struct>"
        if name in ("turns", "reward_parts", "images")
        else re.sub(r"<(element|item): ", "<", kind)
        for name, kind in shown.items()
    }


def test_every_column_is_documented_with_its_type_in_its_place() -> None:
    columns = documented("trajectories", "Columns", "column")
    assert columns.pop("iteration") == "partition, int"
    assert list(columns.items()) == list(types(MULTIMODAL_SCHEMA).items())


def test_every_column_a_batch_adds_is_documented() -> None:
    added = pa.schema([field for field in BATCH_SCHEMA if field.name not in SCHEMA.names])
    assert documented("metrics", "Batches", "column") == types(added)


def test_every_column_of_scores_is_documented_with_its_type_in_its_place() -> None:
    assert list(documented("metrics", "Scores", "column").items()) == list(types(SCORES).items())


def test_every_column_of_judgements_is_documented_with_its_type_in_its_place() -> None:
    assert list(documented("trajectories", "Judgements", "column").items()) == list(types(JUDGEMENTS).items())


def test_every_column_of_outcomes_is_documented_with_its_type_in_its_place() -> None:
    assert list(documented("metrics", "Outcomes", "column").items()) == list(types(OUTCOMES).items())


def test_every_field_of_a_turn_is_documented() -> None:
    assert list(documented("trajectories", "Turns", "field of a turn")) == [field.name for field in TURN]


def test_the_schema_version_is_documented() -> None:
    assert f"The current schema version is {SCHEMA_VERSION}." in (PAGES / "trajectories.md").read_text(
        encoding="utf-8"
    )


def test_make_run_trains_the_run_that_the_pages_open() -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "run"], cwd=ROOT, capture_output=True, check=True, encoding="utf-8"
    ).stdout
    assert "sf train configs/quickstart.yaml --set run_id=quickstart\n" in shown
    opened = set(re.findall(r"runs/[^/\"']+(?=[/\"'])", "".join(QUERIES.values())))
    assert opened == {"runs/quickstart", "runs/choosing"}


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of twelve iterations whose data alone is real."""
    folder = tmp_path_factory.mktemp("page")
    run = RunDirectory(str(folder / "runs" / "quickstart"))
    runs.configure(run)
    messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    for iteration in range(12):
        rows = [runs.conversation(messages, session_id=f"s{iteration}")]
        runs.sample(run, iteration, rows)
        write_trajectories(run, iteration, rows, "evaluation-1", "evaluations")
        write_metrics(run, "train", iteration, [dict.fromkeys(METRICS, 1.0)])
        [table] = [read_trajectories(run.partition("trajectories", iteration) + "/rollout-1.parquet")]
        ones = [np.ones(2, np.float32)]
        write_batch(run, iteration, table, advantages=ones, weights=ones, decisions=["train"], part="batch-1")
    # what `sf evaluate` keeps of other measurements
    measured = RunDirectory(run.path("measured/v00000-1"))
    write_metrics(measured, "evaluation", 0, [dict.fromkeys(METRICS, 1.0)])
    return folder


@pytest.mark.parametrize(
    ("query", "cells"),
    [
        (
            "Groups by iteration and source (DuckDB)",
            [["0", "sums", "2", "1", "0", "0.75"], ["1", "sums", "3", "1", "1", "0.5"]],
        ),
        ("Solved tasks that were sampled again (DuckDB)", [["sums", "4", "2", "2", "1", "0.5"]]),
    ],
)
def test_queries_of_outcomes_count_groups_and_what_was_taken_again(
    tmp_path: Path,
    query: str,
    cells: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunDirectory(str(tmp_path / "runs" / "choosing"))
    rows = [
        [runs.group_row(0, [1, 1], task_index=5), runs.group_row(1, [1, 0], task_index=6)],
        [
            runs.group_row(2, [1, 1], task_index=5),
            runs.group_row(3, [], task_index=6, verdict="timeout"),
            runs.group_row(4, [0, 0], task_index=5, verdict="not_mixed"),
        ],
    ]
    for iteration, left in enumerate(rows):
        write_outcomes(run, iteration, left, "rollout-1")
    monkeypatch.chdir(tmp_path)
    exec(compile(QUERIES[query], query, "exec"), {})
    shown = [line.strip("│ ").split() for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [[cell for cell in row if cell != "│"] for row in shown][2:] == cells


METRICS = ("loss", "entropy", "kl", "grad_norm", "clip_fraction", "lag_mean")


@pytest.mark.parametrize(
    "query",
    [
        "Rewards per iteration (pandas)",
        "Held-out rewards by policy version (DuckDB)",
        "Metrics of training (pandas)",
        "Trained tokens and their lag (DuckDB)",
        "Share of rows that the policy learns from (polars)",
        "Parts of the reward (DuckDB)",
    ],
)
def test_iterations_sort_as_numbers(
    page_folder: Path, query: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(page_folder)
    exec(compile(QUERIES[query], query, "exec"), {})
    table = re.sub(r"[│┆]", " ", capsys.readouterr().out).splitlines()
    cells = [line.split() for line in table if line.split()]
    # pandas numbers the rows of this table itself
    column = 1 if query == "Metrics of training (pandas)" else 0
    found = [int(row[column]) for row in cells if len(row) > 2 and row[column].isdigit()]
    assert found == sorted(found) and {0, 2, 10} <= {*found}
