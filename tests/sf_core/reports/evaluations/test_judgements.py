"""What is told of judges: in metrics, in sentences, and in the judgements of a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from sf_core.reports.evaluations.judgements import (
    describe_judgement,
    judge_metrics,
    judge_rows,
    judgements_of,
    sum_judges,
)
from sf_core.reports.html.page import write_report
from sf_core.reports.outcomes.figures import rollout_metrics
from sf_core.reports.run_page import RunPage, show_text
from sf_core.reports.tables import inspect_run, inspect_session
from sf_core.reports.view import RunView
from storage.manifests import Manifest
from storage.run_directory import STAGES, RunDirectory
from storage.tables.judgements import Judgement, write_judgements
from storage.tables.trajectories import write_trajectories
from tests.bench import runs
from tests.bench.reports.report_runs import opened
from tests.bench.reports.tables import shown

MANNERS = {"calls": 300, "tokens": 9000, "p95_seconds": 0.25, "unread": 2, "cached": 12, "agreement": None}
PAIRS: dict[str, Any] = {
    "calls": 20,
    "tokens": 800,
    "p95_seconds": 1.5,
    "unread": 0,
    "cached": 0,
    "agreement": 0.75,
}
PAIRS |= {"discarded": {"length": 3, "refusal": 1}}
TOLD: dict[str, Any] = {"judges": {"manners": MANNERS, "pairs": PAIRS}, "noted": {"length": 12.5}}

ASKED = [
    Judgement(
        judge="manners",
        item="polite",
        messages="[]",
        reply="yes",
        verdict='{"yes":0.8,"no":0.2}',
        tokens=40,
        seconds=0.123,
        attempts=1,
    ),
    Judgement(
        judge="manners",
        item="polite",
        messages="[]",
        reply="yes",
        verdict='{"yes":0.8,"no":0.2}',
        cached=True,
    ),
    Judgement(judge="manners", messages="[]", reply="perhaps\x1b[31m", tokens=41, seconds=0.5, attempts=2),
    Judgement(judge="pairs", item="better", messages="[]", seconds=4.0, attempts=4, discarded=["length"] * 3),
    Judgement(item="length", verdict="12.5"),
]


@pytest.fixture
def judged_run(runs_root: str) -> RunDirectory:
    """A run of one iteration, in whose rollout and in whose evaluation judges were asked."""
    run = RunDirectory(f"{runs_root}/run-1")
    runs.configure(run, train={"iterations": 1})
    times = {"started_at": 1000.0, "finished_at": 1010.0}
    more: dict[str, dict[str, Any]] = {
        "rollout": {"reward_mean": 0.5, "sampled_tokens": 5, "failures": {}, "rejected": {}} | TOLD,
        "filter": {"lags": [1], "zero_advantage_share": 0.0},
    }
    talk = [{"role": "user", "content": "Ask."}, {"role": "assistant", "content": "Please."}]
    told = {"reward_mean": 0.25, "failures": {}, "unjudged": 3, "judges": {"manners": MANNERS}}
    asked = [("other", ASKED[0])]
    rows = [runs.conversation(talk, session_id="s0", branch_id="s0.b0")]
    files = [write_trajectories(run, 0, rows, "one")]
    files.append(write_judgements(run, 0, [*(("s0", one) for one in ASKED), *asked], "one"))
    runs.commit(run, 0, "rollout", outputs=files, data=more["rollout"] | times)
    rows = [runs.conversation(talk, session_id="h0", branch_id="h0.b0")]
    files = [write_trajectories(run, 0, rows, "two", "evaluations")]
    judged = [*asked, *(("h0", one) for one in ASKED)]
    files.append(write_judgements(run, 0, judged, "two", "evaluations"))
    runs.commit(run, 0, "evaluate", outputs=files, data=told | times)
    for stage in STAGES[1:]:
        runs.commit(run, 0, stage, data=more.get(stage, {}) | times)
    return run


def test_metrics_name_the_judge_and_leave_out_what_is_not_known() -> None:
    manifest = Manifest(run_id="r", iteration=0, stage="rollout", attempt=1, data=TOLD)
    metrics = rollout_metrics(manifest)
    assert metrics == judge_metrics(TOLD)
    assert metrics["noted.length"] == 12.5 and metrics["judge.manners.calls"] == 300
    assert metrics["judge.pairs.agreement"] == 0.75 and "judge.manners.agreement" not in metrics
    assert metrics["judge.pairs.discarded.length"] == 3.0
    assert judge_metrics({"unjudged": 3}) == {"unjudged": 3.0}
    assert judge_metrics({}) == {} and rollout_metrics(None) == {}


def test_held_out_sessions_that_were_not_judged_are_told_with_those_that_failed(
    judged_run: RunDirectory, tmp_path: Path
) -> None:
    told = "failed held-out sessions: not_judged 3"
    assert told in shown(inspect_run(judged_run.uri))
    report = write_report(judged_run.uri, str(tmp_path / "report.html"), 16)
    assert told in Path(report).read_text(encoding="utf-8")


def test_rows_of_training_and_of_held_out_sessions_are_summed_by_judge(judged_run: RunDirectory) -> None:
    iterations = RunView(judged_run).iterations
    rows = judge_rows(iterations)
    assert [(row["iteration"], row["sessions"], row["judge"]) for row in rows] == [
        (0, "held-out", "manners"),
        (0, "training", "manners"),
        (0, "training", "pairs"),
    ]
    assert sum_judges(iterations) == [
        "judge manners: 600 calls, 18,000 tokens, 24 questions known before, "
        "4 replies that could not be read, 95 % of calls within 0.25 s",
        "judge pairs: 20 calls, 800 tokens, 0 questions known before, 0 replies that could not be read, "
        "95 % of calls within 1.50 s, 4 replies discarded: length 3, refusal 1, orders agree in 75%",
    ]


@pytest.mark.parametrize("session", ["s0", "h0"])
def test_a_session_has_its_judgements_in_their_order(judged_run: RunDirectory, session: str) -> None:
    view = RunView(judged_run)
    assert judgements_of(view, view.find_session(session)[0], session) == ASKED
    assert [describe_judgement(one) for one in ASKED] == [
        'polite {"yes":0.8,"no":0.2} (40 tokens, 1 calls, 0.12 s)',
        'polite {"yes":0.8,"no":0.2} (known before)',
        "perhaps\x1b[31m, which could not be read (41 tokens, 2 calls, 0.50 s)",
        "better no reply (0 tokens, 4 calls, 4.00 s; discarded replies: length 3)",
        "length 12.5",
    ]
    text = shown(inspect_session(judged_run.uri, session))
    assert "what judges said, and what was noted" in text and "noted: length 12.5" in text
    assert 'manners: polite {"yes":0.8,"no":0.2} (40 tokens' in text
    # a judge cannot steer the terminal
    assert "\x1b" not in text and "perhaps\\x1b[31m" in text


def test_what_is_shown_of_a_run_has_its_judges(judged_run: RunDirectory) -> None:
    assert "judge pairs: 20 calls" in shown(inspect_run(judged_run.uri))
    page = RunPage(judged_run)
    page.update(0)
    assert f"## Judges\n\n- {show_text('judge manners: 600 calls')}" in page.report()


def test_the_report_has_a_table_of_judges(judged_run: RunDirectory, browser: Browser, tmp_path: Path) -> None:
    report = write_report(judged_run.uri, str(tmp_path / "report.html"), 16)
    with opened(browser, report, offline=True) as page:
        rows = page.locator("#judges tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.nth(2)).to_contain_text("pairs208000")
        expect(rows.nth(2)).to_contain_text("length 3, refusal 1")
        expect(rows.nth(2)).to_contain_text("75 %")


def test_a_run_without_judges_is_shown_without(tmp_path: Path) -> None:
    bare = RunDirectory(str(tmp_path / "bare"))
    runs.configure(bare, train={"iterations": 1})
    talk = [{"role": "user", "content": "Ask."}, {"role": "assistant", "content": "Please."}]
    files = [write_trajectories(bare, 0, [runs.conversation(talk)], "one")]
    data = {"reward_mean": 0.5, "failures": {}, "rejected": {}}
    runs.commit(bare, 0, "rollout", outputs=files, data=data)
    text = shown(inspect_run(bare.uri)) + shown(inspect_session(bare.uri, "s0"))
    assert "judge" not in text.replace(bare.uri, "")
    page = write_report(bare.uri, str(tmp_path / "report.html"), 16)
    assert 'id="judges"' not in Path(page).read_text(encoding="utf-8")
