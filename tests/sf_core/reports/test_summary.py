from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from uuid import uuid4

from sf_core.reports.summary import orchestration_seconds, summarise
from sf_core.reports.view import RunView
from storage.manifests import Manifest
from storage.run_directory import STAGES, RunDirectory
from tests.bench import runs
from tests.bench.reports import report_runs


def iteration(number: int, attempt: int, *stages: tuple[str, float, float]) -> list[Manifest]:
    return [
        Manifest(
            run_id="r",
            iteration=number,
            stage=name,
            attempt=attempt,
            data=runs.stage_data(name, started_at=start, finished_at=end),
        )
        for name, start, end in stages
    ]


def view(iterations: Iterable[list[Manifest]]) -> RunView:
    """View of a run with these manifests."""
    run = RunDirectory(f"memory://{uuid4()}/r")
    for manifest in chain.from_iterable(iterations):
        run.commit_manifest(manifest)
    return RunView(run)


def without_a_stage(iterations: Iterable[list[Manifest]]) -> float:
    return orchestration_seconds(view(iterations).iterations)


RUN = [
    iteration(0, 1, ("rollout", 10, 11), ("filter", 11, 12), ("train", 13, 15), ("publish", 15, 16)),
    iteration(
        1,
        1,
        ("evaluate", 17, 19),
        ("rollout", 18, 19),
        ("filter", 19, 20),
        ("train", 20, 24),
        ("publish", 25, 26),
    ),
    iteration(2, 2, ("rollout", 100, 101), ("filter", 101, 101), ("train", 101, 102), ("publish", 102, 103)),
]


def test_iterations_follow_each_other_without_a_gap_except_between_attempts() -> None:
    assert view(RUN).windows == {0: (10, 16), 1: (16, 26), 2: (100, 103)}


def test_the_window_of_an_iteration_is_the_same_wherever_reading_begins() -> None:
    assert view(RUN).between(1).windows == {1: (16, 26), 2: (100, 103)}
    assert view(RUN).iteration(1).window == (16, 26)


def test_an_iteration_that_is_not_through_has_no_window() -> None:
    begun = iteration(3, 2, ("rollout", 103, 104))
    assert list(view([*RUN, begun]).windows) == [0, 1, 2]
    assert [found.number for found in view([*RUN, begun]).iterations] == [0, 1, 2, 3]


def test_a_view_keeps_what_it_found_and_the_next_one_has_what_was_committed_since() -> None:
    early = view(RUN[:1])
    assert [found.number for found in early.iterations] == [0]
    for manifest in RUN[1]:
        early.run.commit_manifest(manifest)
    assert [found.number for found in early.iterations] == [0]
    assert [found.number for found in RunView(early.run).iterations] == [0, 1]


def resumed() -> list[Manifest]:
    """An iteration that a later attempt finished eight hours after the first one."""
    begun = iteration(2, 1, ("rollout", 27, 29), ("filter", 29, 30))
    begun[0].data["sampled_tokens"] = 70
    ended = iteration(2, 3, ("train", 28900, 28904), ("publish", 28904, 28905), ("evaluate", 28900, 28902))
    return [*begun, *ended]


def test_the_time_in_which_nothing_ran_is_in_no_iteration() -> None:
    stages = [(stage, 28906 + k, 28907 + k) for k, stage in enumerate(STAGES)]
    windows = view([*RUN[:2], resumed(), iteration(3, 3, *stages)]).windows
    assert (windows[2], windows[3]) == ((28900, 28905), (28905, 28910))
    assert without_a_stage([*RUN[:2], resumed()]) == 1 + (1 + 1) + 0


def test_tokens_that_were_sampled_outside_the_window_of_an_iteration_do_not_count_in_it() -> None:
    ended = resumed()
    ended[-1].data["sampled_tokens"] = 5
    assert view([*RUN[:2], ended]).iteration(2).sampled_tokens == 5


def test_what_no_stage_accounts_for_is_orchestration() -> None:
    assert without_a_stage(RUN) == 1 + (1 + 1) + 0


def test_what_engines_sampled_is_counted_beside_the_tokens_of_sealed_sessions(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-1"))
    config = runs.configure(run, train={"iterations": 2})
    runs.commit(run, None, "start", data={"started_at": report_runs.AT})
    for number in range(2):
        rows = [report_runs.talk(f"run-1.g{number}.0.a1", "hello", "hi", [number])]
        report_runs.commit_iteration(run, number, rows, max_lag=0)
    # 70 in each batch, of the 100 in each span
    told = summarise(RunView(run), config)
    assert (told["tokens_generated"], told["tokens_sampled"]) == (140, 200)
