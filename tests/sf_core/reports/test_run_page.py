import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from PIL import Image

from sf_core.reports import run_page
from sf_core.reports.run_page import RunPage, show_text, waits_table
from sf_core.reports.timeline import record_devices
from sf_core.reports.view import RunView
from sf_core.scheduling.timeline import Span
from storage.run_directory import STAGES, RunDirectory
from storage.tables.trajectories import write_trajectories
from tests.bench import runs
from tests.bench.reports import spans

DATA: dict[str, dict[str, Any]] = {
    "rollout": {"reward_mean": 0.25, "sampled_tokens": 500, "failures": {"timeout": 2, "agent_error": 1}},
    "filter": {"lags": [30, 10], "zero_advantage_share": 0.5},
}


@pytest.fixture
def configured_run(runs_root: str) -> RunDirectory:
    run = RunDirectory(f"{runs_root}/run-1")
    runs.configure(run, train={"iterations": 4})
    return run


def turn(run: RunDirectory, number: int) -> None:
    """Commit an iteration of 10 s in which the device computes for 4 s."""
    start = spans.AT + 10 * number
    for stage in STAGES:
        times = {"started_at": start, "finished_at": start + 10}
        runs.commit(run, number, stage, data=DATA.get(stage, {}) | times)
    lease = f"train-{number}"
    spans.write_spans(
        run,
        Span("t0", "train", start, start + 10, "held", "", None, lease),
        Span("t0", "train", start + 2, start + 6, "busy", "train", number, lease),
    )


MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def read_rows(markdown: str) -> list[list[str]]:
    """The texts that a table shows, headings first. Raises ValueError if a cell shows more than text."""
    rows: list[list[str]] = []
    for token in MARKDOWN.parse(markdown):
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and rows:
            rows[-1].append(read_text(token))
    return rows


def read_text(token: Token) -> str:
    parts = token.children or []
    if marks := [part.type for part in parts if part.type not in ("text", "text_special")]:
        raise ValueError(f"read as {marks}: {token.content}")
    return "".join(part.content for part in parts)


def evaluate(run: RunDirectory, version: int, reward: float) -> None:
    times = {"started_at": spans.AT, "finished_at": spans.AT}
    runs.commit(run, version, "evaluate", data={"reward_mean": reward} | times)


def test_an_iteration_is_a_row_and_the_newest_comes_first(configured_run: RunDirectory) -> None:
    page = RunPage(configured_run)
    turn(configured_run, 0)
    page.update(0)
    assert page.progress == 25
    row = {
        "iteration": 0,
        "reward": 0.25,
        "failed sessions": "timeout 2, agent_error 1",
        "held-out reward": None,
        "lag": 0.25,
        "tokens/s": 50.0,
        "idle share": 0.6,
        "zero-advantage share": 0.5,
    }
    assert page.table == [row]
    # what the iteration has made is evaluated while the next one runs
    evaluate(configured_run, 1, 0.75)
    turn(configured_run, 1)
    page.update(1)
    assert page.progress == 50
    assert page.table == [row | {"iteration": 1}, row | {"held-out reward": 0.75}]


def test_a_run_that_chooses_shows_how_many_groups_were_right_mixed_and_wrong(
    configured_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.configure(configured_run, train={"iterations": 4}, rollout={"gate": "mixed"})
    turn(configured_run, 0)  # of before the kinds were counted
    monkeypatch.setitem(DATA, "rollout", DATA["rollout"] | {"right": 3, "mixed": 8, "wrong": 1})
    turn(configured_run, 1)
    page = RunPage(configured_run)
    page.update(1)
    assert [row["groups right/mixed/wrong"] for row in page.table] == ["3/8/1", ""]


def test_a_run_with_a_teacher_shows_how_far_it_is_from_it(
    configured_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.configure(configured_run, train={"iterations": 4, "teacher": {"weights": "start"}})
    turn(configured_run, 0)
    monkeypatch.setitem(DATA, "train", {"teacher_kl": 0.12345678})
    turn(configured_run, 1)
    page = RunPage(configured_run)
    page.update(1)
    assert [row["KL to the teacher"] for row in page.table] == [0.1235, None]


def test_another_attempt_shows_the_iterations_before_it(configured_run: RunDirectory) -> None:
    for number in range(3):
        turn(configured_run, number)
    page = RunPage(configured_run)
    page.update(2)
    assert [row["iteration"] for row in page.table] == [2, 1, 0]


def test_of_a_long_run_the_last_iterations_are_shown(
    configured_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_page, "NUM_ROWS", 2)
    page = RunPage(configured_run)
    for number in range(4):
        turn(configured_run, number)
        page.update(number)
    assert [(row["iteration"], row["tokens/s"]) for row in page.table] == [(3, 50.0), (2, 50.0)]


def test_the_report_holds_its_pictures_and_says_where_the_files_are(configured_run: RunDirectory) -> None:
    evaluate(configured_run, 0, 0.125)
    turn(configured_run, 0)
    evaluate(configured_run, 1, 0.75)
    page = RunPage(configured_run)
    page.update(0)
    report = page.report()
    assert "1 of 4 iterations are through. Held-out reward 0.125 (version 0) → 0.750 (version 1)." in report
    pictures = re.findall(r"!\[.*\]\(data:image/png;base64,(.*)\)", report)
    assert len(pictures) == 2
    for picture in pictures:
        Image.open(io.BytesIO(base64.b64decode(picture))).verify()
    batches = configured_run.path("batches")
    assert f"[{batches}]({batches if '://' in batches else 'file://' + batches})" in report
    assert configured_run.checkpoint_dir(1) in report


def test_the_report_has_the_table_of_the_devices(configured_run: RunDirectory) -> None:
    for number in range(3):
        turn(configured_run, number)
    record_devices(RunView(configured_run), 2, is_over=True)
    page = RunPage(configured_run)
    page.update(2)
    lines = page.report().partition("## Devices in figures\n\n")[2].splitlines()
    assert lines[0].startswith("| # | idle t0 | busy all |")
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 5


def test_waits_are_told_with_since_when_and_until_when() -> None:
    what = "batch 3: 2 of 8 groups | *engines* of <r0>"
    *times, told = read_rows(waits_table([{"what": what, "since": spans.AT, "until": spans.AT + 1800}]))[-1]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", time) for time in times) and told == what
    assert waits_table([]) == "Nothing takes long at the moment."


def test_answers_of_policies_are_shown_and_never_read_as_markdown(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    runs.configure(run, train={"iterations": 4}, evaluate={"num_tasks": 1})
    turn(run, 0)
    hostile = "![x](http://evil/p.png) | <img src=x> `a` *b* [c](d)\n# e"
    for version, text in ((0, "plain answer"), (1, hostile)):
        messages = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": text}]
        ref = write_trajectories(
            run, version, [runs.conversation(messages, group_id=None)], "e-1", "evaluations"
        )
        times = {"started_at": spans.AT, "finished_at": spans.AT, "reward_mean": 0.5, "failures": {}}
        runs.commit(run, version, "evaluate", outputs=[ref], data=times)
    page = RunPage(run)
    page.update(0)
    report = page.report()
    answers = report.partition("## Answers to held-out tasks")[2].partition("##")[0]
    assert read_rows(answers)[1:] == [["ask", "0.50 plain answer", f"0.50 {' '.join(hostile.split())}"]]


def test_no_character_is_shown_as_an_entity() -> None:
    """The Prefect UI shows numeric entities as they are written."""
    assert show_text("Spell (example: sun -> nus): leally") == (r"Spell \(example\: sun \-\> nus\)\: leally")


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1))
def test_any_text_is_shown_as_it_is_in_a_table_a_list_and_a_heading(text: str) -> None:
    shown = show_text(text)
    assert read_rows(f"| told |\n|---|\n| {shown} |\n")[1:] == [[text]]
    for place in (f"- {shown}", f"# {shown}"):
        [line] = [token for token in MARKDOWN.parse(place) if token.type == "inline"]
        assert read_text(line) == text
