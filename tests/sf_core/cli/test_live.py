from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sf_core.cli import live as live_view
from sf_core.cli.live import HeldOutRewards, LineProgress, NewLines, RunProgress
from sf_core.waits import clock
from storage.run_directory import RunDirectory
from tests.bench.runs import commit, configure
from tests.sf_core.cli.status import STATUS


def shown(status: dict[str, Any], iterations: int) -> str:
    console = Console(file=StringIO(), width=120, record=True)
    progress = RunProgress(console, iterations)
    progress.update(status, {0: 0.25, 4: 0.75})
    console.print(progress)
    return console.export_text()


def test_a_running_run_shows_stage_groups_reward_and_engines() -> None:
    text = shown(STATUS, iterations=10)
    assert "3/10 train 2" in text
    assert "5/8" in text and "11 in flight" in text
    assert "1,234 tokens/s · reward 0.50 · held-out 0.25 → 0.75 · 88 sessions · r0:v2 t0:starting" in text


def test_a_long_wait_and_a_straggler_are_shown() -> None:
    late = {"straggler": STATUS["straggler"] | {"age_s": 95.0}}
    wait = {"wait": {"what": "batch 3: 3 of 8 groups", "since": 0.0, "until": 1800.0}}
    text = shown(STATUS | late | wait, iterations=10)
    assert "for batch 3: 3 of 8 groups" in text
    assert "oldest session run-1.g3.0.a0: 95 s" in text
    assert "oldest session" not in shown(STATUS, iterations=10)


def test_failures_are_shown_by_reason_with_the_last_error() -> None:
    counters = {"failed_sessions": 384, "failures.agent_error": 380, "failures.timeout": 4}
    text = shown(
        STATUS | {"counters": counters, "last_error": "my_agent.py:12: agent raised KeyError: x"}, 10
    )
    told = " ".join(text.split())
    assert "384 sessions failed: timeout 4, agent_error 380; last error: my_agent.py:12: agent raised" in told
    assert "failed" not in shown(STATUS, iterations=10)


def test_once_every_batch_is_sealed_no_group_is_awaited() -> None:
    text = shown(STATUS | {"groups_accepted": 0, "groups_in_flight": 0}, iterations=3)
    assert "8/8" in text
    assert "in flight" not in text


def test_held_out_rewards_appear_as_they_are_committed_whatever_the_storage_does_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_view, "LOOK_S", 0.0)
    run = RunDirectory(str(tmp_path / "r"))
    sections = {"train": {"iterations": 3}, "evaluate": {"every": 2}, "storage": {"root": str(tmp_path)}}
    held_out = HeldOutRewards(configure(run, **sections))
    assert held_out.refresh() == {}
    # what stands where a file should be cannot be read
    in_the_way = Path(run.manifest_file(0, "evaluate"))
    in_the_way.mkdir(parents=True)
    assert held_out.refresh() == {}
    in_the_way.rmdir()
    in_the_way.write_text("{", encoding="utf-8")
    assert held_out.refresh() == {}
    in_the_way.unlink()
    for version in (0, 2):
        commit(run, version, "evaluate", data={"reward_mean": version / 10})
    assert held_out.refresh() == {0: 0.0, 2: 0.2}
    commit(run, 3, "evaluate", data={"reward_mean": 0.3})
    assert held_out.refresh() == {0: 0.0, 2: 0.2, 3: 0.3}


def test_held_out_rewards_are_not_looked_for_at_every_update(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    held_out = HeldOutRewards(configure(run, storage={"root": str(tmp_path)}))
    assert held_out.refresh() == {}
    commit(run, 0, "evaluate", data={"reward_mean": 0.5})
    assert held_out.refresh() == {}


def lines() -> tuple[LineProgress, Callable[[], list[str]]]:
    console = Console(file=StringIO(), width=40, record=True)
    # each begins with the time of day
    return LineProgress(console), lambda: [line[10:] for line in console.export_text().splitlines()]


def test_without_a_terminal_what_a_flow_logs_of_its_progress_and_waits_is_passed_on() -> None:
    progress, told = lines()
    progress.show_status("watch it at http://127.0.0.1:4200")
    for line in (
        "17:00:01.123 | WARNING | sf_core.waits - waiting since 17:00:00, until 18:00:00, for the warm start",
        "17:00:01.124 | INFO    | sf_core.reports.log_lines - iteration 0, 1 of 3: reward 0.250, 2.0 s",
        "17:00:01.125 | WARNING | distributed.core - sf_core.reports.log_lines - not ours",
        "Traceback (most recent call last):",
    ):
        progress.hear(line)
    assert told() == [
        "watch it at http://127.0.0.1:4200",
        "waiting since 17:00:00, until 18:00:00, for the warm start",
        "iteration 0, 1 of 3: reward 0.250, 2.0 s",
    ]


def test_without_a_terminal_a_wait_is_told_once_as_the_data_plane_knows_it() -> None:
    progress, told = lines()
    wait = {"what": "batch 3: 3 of 8 groups; no agent runner is connected", "since": 0.0, "until": 1800.0}
    for status in (STATUS, STATUS | {"wait": wait}, STATUS | {"wait": wait}):
        progress.update(status, {})
    progress.hear("17:00:01.123 | WARNING | sf_core.waits - waiting since 17:00:00, for batch 3")
    progress.hear("17:00:01.124 | INFO    | sf_core.reports.log_lines - iteration 3, 4 of 8: reward 0.250")
    progress.update(STATUS | {"wait": wait | {"since": 60.0}}, {})
    assert told() == [
        f"waiting since {clock(0.0)} for {wait['what']}",
        "iteration 3, 4 of 8: reward 0.250",
        f"waiting since {clock(60.0)} for {wait['what']}",
    ]


def test_the_new_lines_of_a_log_are_read_once_and_when_they_are_complete(tmp_path: Path) -> None:
    file = tmp_path / "flow.log"
    assert list(NewLines(file).read()) == []
    file.write_text("old\n", encoding="utf-8")
    new = NewLines(file)
    with open(file, "a", encoding="utf-8") as log:
        for text, expected in (("", []), ("one\ntw", ["one"]), ("o\n\xfc\n", ["two", "\xfc"])):
            log.write(text)
            log.flush()
            assert list(new.read()) == expected
    file.write_text("rotated\n", encoding="utf-8")
    assert list(new.read()) == ["rotated"]
