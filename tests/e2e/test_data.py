"""The files of a trained run open as docs/reference says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pandas
import pytest

from sf_core.config import RunConfig
from sf_core.stages.run import begin_attempt
from sf_core.stages.start import start
from storage.run_directory import RunDirectory
from tests.bench import ROOT, stacks
from tests.bench.stacks.cluster import Cluster

# the first of them trains the quickstart, which takes two minutes on a quiet machine

SNIPPETS = [
    (page, number, code)
    for page in ("reading", "readers", "weights")
    for number, code in enumerate(
        re.findall(
            r"```python\n(.*?)```",
            (ROOT / "docs" / "reference" / f"{page}.md").read_text(encoding="utf-8"),
            re.DOTALL,
        )
    )
]
"""Code of the pages."""


@pytest.fixture(scope="module")
def quickstart_folder(quickstart: RunConfig) -> Path:
    """Folder in which `sf train` was called, with runs/quickstart."""
    return Path(quickstart.run_dir).parents[1]


def test_the_code_of_the_pages_is_found() -> None:
    assert len(SNIPPETS) == 26


# those of a run that chooses are in tests/storage/test_data_page.py
@pytest.mark.parametrize(
    ("page", "number", "code"), [snippet for snippet in SNIPPETS if "runs/choosing" not in snippet[2]]
)
def test_the_code_of_the_pages_runs(
    quickstart_folder: Path,
    page: str,
    number: int,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "pyspark" in code:
        pytest.importorskip("pyspark", reason="pyspark is not installed (400 MB)")
        # Java keeps the folder in which it was started
        code = code.replace("runs/quickstart", f"{quickstart_folder}/runs/quickstart")
    monkeypatch.chdir(quickstart_folder)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    exec(compile(code, f"docs/reference/{page}.md, code {number}", "exec"), {})
    shown = capsys.readouterr().out
    assert shown.strip() and "Empty DataFrame" not in shown and "(0, " not in shown and "0 rows" not in shown


def test_its_conversations_are_exported(quickstart: RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    said = stacks.quickstart.read("export", quickstart.run_dir, "--to", "trl", str(out))
    assert "out.jsonl: 3072 conversations for trl; 0 left out" in said
    assert "not compared" not in said
    assert len(out.read_text(encoding="utf-8").splitlines()) == 3072


# tests/sf_core/stages/test_retention.py has what is kept, tests/sf_core/cli/test_replay.py has replays
@pytest.mark.nightly
def test_a_cleaned_run_goes_on_and_is_replayed_from_further_back(
    cluster: Cluster, quickstart_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(quickstart_folder / "runs", tmp_path / "runs")
    runs = tmp_path / "runs"
    assert "quickstart  finished  12/12" in stacks.quickstart.read("ls", str(runs))
    assert "removed 13 items" in stacks.quickstart.read("gc", str(runs), "--journals", "--yes")
    run = runs / "quickstart"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["00012"]

    settings = stacks.quickstart.options(run_id="quickstart", train__iterations=13, evaluate__num_tasks=4)
    done = stacks.quickstart.sf(tmp_path, "train", stacks.quickstart.CONFIG, *settings, on=cluster.services)
    assert done.returncode == 0, done.stdout + done.stderr
    done = stacks.quickstart.sf(tmp_path, "replay", str(run), "--iteration", "12")
    assert (done.returncode, done.stdout) == (0, "iteration 12: the weights are equal, bit for bit\n")


# evaluations are in tests/sf_core/reports/evaluations and in every run's last stage
@pytest.mark.nightly
def test_a_stopped_run_is_measured_once_and_keeps_its_configuration(cluster: Cluster, tmp_path: Path) -> None:
    config = cluster.config("measured")
    # it stopped when it had a policy
    start(begin_attempt(config))
    evaluate = ["evaluate", config.run_dir]
    done = stacks.quickstart.sf(tmp_path, *evaluate, "--set", "evaluate.num_tasks=3", on=cluster.services)
    assert done.returncode == 0, done.stdout + done.stderr
    line = re.search(r"held-out reward of version 0: .* over 3 sessions", done.stdout)
    assert (
        line
        and "run measured: uses its stored configuration, except for evaluate.num_tasks 3 (was 4)"
        in done.stdout
    )
    assert stacks.quickstart.read(*evaluate) == f"{line[0]}, measured before\n"
    assert RunDirectory(config.run_dir).read_config(RunConfig) == config
    assert list(stacks.invariants.manifests(config)) == [(0, "evaluate")]


# comparisons are in tests/sf_core/reports/evaluations, one evaluation by a stack above
@pytest.mark.nightly
def test_versions_are_compared_on_other_tasks_and_in_other_ways(
    cluster: Cluster, quickstart_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(quickstart_folder / "runs", tmp_path / "runs")
    run = str(tmp_path / "runs" / "quickstart")
    changes = stacks.quickstart.options(evaluate__num_tasks=8, evaluate__answers=2, rollout__temperature=0.5)
    compared = ["evaluate", run, "--against", "0", *changes]
    done = stacks.quickstart.sf(tmp_path, *compared, on=cluster.services)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 tasks of quickstart, 2 answers each" in done.stdout
    assert re.search(r"version 0: reward .* pass@1 .* pass@2 .*\nversion 12: reward ", done.stdout)
    # both are measured now, so nothing is started
    again = stacks.quickstart.read(*compared, "--json")
    found = json.loads(again)
    assert (found["before"]["version"], found["after"]["version"], found["tasks"]) == (0, 12, 8)
    gained = found["after"]["reward"] - found["before"]["reward"]
    assert found["difference"] == pytest.approx(gained) and len(found["examples"]) == 4
    kept = list((tmp_path / "runs" / "quickstart" / "measured").glob("*.json"))
    assert len(kept) == 1 and not list(kept[0].parent.glob("*/start/*.safetensors"))
    # readers of the run's own evaluations do not see them
    assert len(pandas.read_parquet(f"{run}/evaluations")["session_id"].unique()) == 2 * 256

    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "What is 2+3?"}\n{"prompt": "Hello"}\n', encoding="utf-8"
    )
    done = stacks.quickstart.sf(tmp_path, "evaluate", run, "--prompts", "prompts.jsonl", on=cluster.services)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 tasks of prompts" in done.stdout and "What is 2+3?" in done.stdout

    done = stacks.quickstart.sf(tmp_path, "evaluate", run, "--against", "40")
    said = done.stdout + done.stderr
    assert (
        done.returncode == 2 and "the weights of version 40 are not stored; stored versions: 0, 1, 2" in said
    )
    done = stacks.quickstart.sf(tmp_path, "evaluate", run, "--set", "train.iterations=3")
    said = done.stdout + done.stderr
    assert (
        done.returncode == 2
        and "an evaluation can only change environment, evaluate, rollout, engine, cluster" in said
    )
