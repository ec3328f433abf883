"""The table of a sweep, from run directories as runs leave them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.config import RunConfig
from sf_core.stages.sweeps.expansion import expand
from sf_core.stages.sweeps.results import (
    count_states,
    describe_states,
    draw,
    escape,
    list_faults,
    read_results,
    setting_row,
    to_data,
    to_markdown,
    unfinished,
)
from sf_core.stages.sweeps.sweep import OpenSweep, Sweep, SweepFolder
from tests.bench.runs import pretend

OPTIONS = ["train.learning_rate=1e-3,fast,1e-2", "train.iterations=2"]


@pytest.fixture
def opened(tmp_path: Path) -> OpenSweep:
    folder = SweepFolder(str(tmp_path), "first")
    return OpenSweep(folder, folder.put(expand(["quickstart"], OPTIONS, 3, "first")))


def finish(opened: OpenSweep, number: int, reward: float, seconds: float = 10.0, iterations: int = 2) -> None:
    """Make a run of the sweep whose iterations are through; with all of them it has a summary."""
    run = opened.sweep.runs[number]
    directory = opened.directory(run)
    directory.write_config(RunConfig.model_validate(run.config))
    pretend(directory, iterations, finished=False)
    if iterations == 2:
        summary = {"iterations": 2, "reward_before": 0.25, "reward_after": reward}
        directory.write_summary(summary | {"seconds_rl": seconds, "tokens_sampled": 1000 + number})


def test_the_table_has_means_intervals_and_what_is_missing(opened: OpenSweep) -> None:
    # runs 0, 2 and 4 have the first setting
    for number, reward in ((0, 0.5), (2, 0.6), (4, 0.7), (1, 0.9)):
        finish(opened, number, reward)
    finish(opened, 3, 0.0, iterations=1)
    opened.folder.note_end("first-lr1e-2-seed1", "it died")
    opened.folder.note_end("first-lr1e-3-seed0", "it died once")
    results = read_results(opened)
    assert [setting_row(result) for result in results] == [
        # 4.303 standard errors of 0.1 and 2, over the square root of three
        ["train.learning_rate=1e-3", "3 of 3", "0.600 ± 0.248", "1,002 ± 5", "10 ± 0"],
        ["train.learning_rate=fast", "0 of 0", "-", "-", "-"],
        ["train.learning_rate=1e-2", "1 of 3", "0.900", "1,001", "10"],
    ]
    refused, failed, left = list_faults(results)
    assert refused.startswith("train.learning_rate=fast has no runs: --set train.learning_rate: ")
    assert failed == "first-lr1e-2-seed1 failed after 1 of 2 iterations: it died"
    assert left == "first-lr1e-2-seed2: not begun"
    assert count_states(results) == {"finished": 4, "failed": 1, "unfinished": 1}
    assert describe_states(results) == "4 of 6 runs are finished, 1 failed, 1 setting was refused"
    # one that failed is tried again
    assert [run.run_id for run in unfinished(opened)] == ["first-lr1e-2-seed1", "first-lr1e-2-seed2"]

    data = to_data(opened, results)
    assert data["settings"][0]["reward"] == {
        "mean": pytest.approx(0.6),
        "half_interval": pytest.approx(0.2484, abs=1e-4),
        "seeds": 3,
    }
    page = to_markdown(opened, results, ["first-lr1e-2-seed2"])
    assert "| `train.learning_rate=1e-3` | 3 of 3 | 0.600 ± 0.248 | 1,002 ± 5 | 10 ± 0 |" in page
    assert "Running now: first-lr1e-2-seed2." in page and "seed2: not begun" not in page
    assert "Student's t" in page and "](data:image/png;base64,iVBOR" in page


def test_a_sweep_without_a_finished_run_has_a_page(opened: OpenSweep) -> None:
    results = read_results(opened)
    assert describe_states(results).startswith("0 of 6 runs are finished")
    assert "data:image" not in to_markdown(opened, results)
    assert draw(opened, results).startswith(b"\x89PNG")


def test_a_sweep_is_extended_by_seeds_and_values_and_keeps_its_runs(opened: OpenSweep) -> None:
    more = opened.folder.put(
        expand(["quickstart"], ["train.learning_rate=1e-3,1e-4", "train.iterations=2"], 4, "first")
    )
    assert [setting.label.partition("=")[2] for setting in more.settings] == ["1e-3", "fast", "1e-2", "1e-4"]
    names = {run.run_id for run in more.runs}
    assert {run.run_id for run in opened.sweep.runs} < names and len(names) == 3 + 3 + 1 + 4
    assert opened.folder.read() == more
    # where runs compute is no other sweep
    moved = expand(["quickstart"], [*OPTIONS, "cluster.scheduler=tcp://10.0.0.7:8786"], 1, "first")
    assert len(opened.folder.put(moved).runs) == len(more.runs)


def test_a_stored_sweep_is_read_as_it_was_written(opened: OpenSweep, tmp_path: Path) -> None:
    assert OpenSweep.read(opened.folder).sweep == opened.sweep
    # moved with its runs, it is run where it is
    assert opened.config(opened.sweep.runs[0]).storage.root == str(tmp_path)
    assert isinstance(Sweep.model_validate_json(opened.sweep.model_dump_json()), Sweep)


@given(st.text())
def test_text_of_a_user_is_no_markup_in_the_page(text: str) -> None:
    shown = escape(text)
    assert "\n" not in shown
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*_\[\]<>#|!&~]", shown)
    assert re.sub(r"\\(.)", r"\1", shown) == " ".join(text.split())
