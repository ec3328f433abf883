"""How runs to a goal are compared: the goal between two evaluations, pairs, intervals, and kept runs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.curricula import find_goal, read_lines, run_config, token_shares
from benchmarks.curriculum_claims import CLAIMS, DOSES, PLAN, Claim, Measured, compare, interval, summary
from benchmarks.recipe_tasks import RecipeTasks
from sf_core.cli.stack.local import Services

RUN = Measured(
    dose=".5/.1/0",
    recipe="uniform",
    seed=0,
    reached=True,
    tokens=1000,
    iterations=40.0,
    live={0: 0.4, 4: 0.85},
    easy={0: 0.97, 4: 0.99},
    token_shares={"live": 1.0},
    groups={"mixed": 5},
    seconds=60.0,
    commit="c0",
)


def pairs(*ratios: float, recipe: str = "srpo") -> list[Measured]:
    return [
        run
        for seed, ratio in enumerate(ratios)
        for run in (
            replace(RUN, seed=seed),
            replace(RUN, seed=seed, recipe=recipe, tokens=ratio * RUN.tokens, iterations=20.0),
        )
    ]


def test_the_goal_is_on_the_line_between_two_evaluations() -> None:
    assert find_goal({0: 0.4, 4: 0.6, 8: 0.85, 12: 0.7}) == (4, 8, pytest.approx(0.8))
    assert find_goal({0: 0.9}) == (0, 0, 1.0)
    assert find_goal({0: 0.4, 4: 0.79}) is None


def test_an_interval_is_that_of_student_over_the_logarithms() -> None:
    assert interval([0.5, 0.5, 0.5]) == [0.5, 0.5, 0.5]
    assert interval([0.5, 2.0]) == pytest.approx([1.0, 0.0, 6681.7], abs=0.1)


def test_pairs_are_compared_by_seed() -> None:
    found = compare([*pairs(0.5, 0.5), replace(RUN, seed=7)], PLAN[0][1])
    assert found is not None
    assert found["seeds"] == [0, 1]
    assert found["tokens"] == [0.5, 0.5, 0.5]
    assert found["iterations"] == [0.5, 0.5, 0.5]
    assert found["easy_stays"] and found["censored"] == [[False, False]] * 2


def test_one_pair_has_no_interval() -> None:
    assert compare(pairs(0.5), PLAN[0][1]) is None


def test_a_claim_is_held_against_the_interval() -> None:
    below = Claim("", "", 0.6, most=0.85)
    within = Claim("", "", 1.0, least=0.8, most=1.25)
    holds_one = Claim("", "", 1.0, holds_one=True)
    assert below.holds([0.6, 0.4, 0.84]) and not below.holds([0.6, 0.4, 0.85])
    assert within.holds([1.0, 0.8, 1.2]) and not within.holds([1.0, 0.79, 1.2])
    assert holds_one.holds([0.9, 0.5, 1.0]) and not holds_one.holds([0.8, 0.5, 0.99])


def test_the_summary_says_what_came_of_each_claim() -> None:
    runs = pairs(0.5, 0.5)
    runs[-1] = replace(runs[-1], reached=False, easy={0: 0.97, 4: 0.9})
    told = summary(runs)
    assert [line["claim"] for line in told["claims"]] == [claim.told for claim in CLAIMS]
    by_claim = dict(zip(CLAIMS, told["claims"], strict=True))
    srpo = by_claim[next(claim for claim in CLAIMS if claim.dose == ".5/.1/0" and claim.recipe == "srpo")]
    assert srpo["holds"]
    assert srpo["shown"] == "0.50 (0.50 to 0.50); 1 of 2 pairs without the goal; easy tasks fell below 0.95"
    assert by_claim[CLAIMS[0]] == {"claim": CLAIMS[0].told, "found": None, "shown": "not run"}


def test_kept_runs_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    assert read_lines(file) == []
    file.write_text(json.dumps(asdict(RUN)) + "\n", encoding="utf-8")
    assert read_lines(file) == [RUN]


def test_tokens_are_shared_out_by_the_kind_of_the_task() -> None:
    tasks = RecipeTasks(easy=0.5)
    rows = [{"task_index": index, "tokens": [1, 2]} for index in range(20)]
    assert token_shares(rows, tasks, 40) == {"easy": 0.5, "live": 0.5}


def test_every_cell_is_a_valid_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.curricula.warm_policy", lambda config: tmp_path)
    services = Services("http://127.0.0.1:1/api", "tcp://127.0.0.1:2", "http://127.0.0.1:3")
    cells = [cell for cells in PLAN for cell in cells]
    configs = [run_config(cell, 3, 100, tmp_path, services) for cell in cells]
    assert len({config.run_id for config in configs}) == len(cells)
    assert {cell.dose for cell in cells} == set(DOSES)
