from sf_core.reports.summary import orchestration_seconds
from sf_core.reports.view import Iteration, iteration_windows
from storage.manifests import Manifest
from storage.run_directory import STAGES


def iteration(number: int, attempt: int, *stages: tuple[str, float, float]) -> Iteration:
    manifests = {
        name: Manifest(
            run_id="r",
            iteration=number,
            stage=name,
            attempt=attempt,
            data={"started_at": start, "finished_at": end},
        )
        for name, start, end in stages
    }
    return Iteration(number, manifests)


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
    assert iteration_windows(RUN) == {0: (10, 16), 1: (16, 26), 2: (100, 103)}


def resumed() -> Iteration:
    """An iteration that a later attempt finished eight hours after the first one."""
    begun = iteration(2, 1, ("rollout", 27, 29), ("filter", 29, 30))
    begun.stages["rollout"].data["sampled_tokens"] = 70
    ended = iteration(2, 3, ("train", 28900, 28904), ("publish", 28904, 28905), ("evaluate", 28900, 28902))
    return Iteration(2, {**begun.stages, **ended.stages})


def test_the_time_in_which_nothing_ran_is_in_no_iteration() -> None:
    stages = [(stage, 28906 + k, 28907 + k) for k, stage in enumerate(STAGES)]
    windows = iteration_windows([*RUN[:2], resumed(), iteration(3, 3, *stages)])
    assert (windows[2], windows[3]) == ((28900, 28905), (28905, 28910))
    assert orchestration_seconds([*RUN[:2], resumed()]) == 1 + (1 + 1) + 0


def test_tokens_that_were_sampled_outside_the_window_of_an_iteration_do_not_count_in_it() -> None:
    ended = resumed()
    ended.stages["evaluate"].data["sampled_tokens"] = 5
    assert ended.sampled_tokens == 5


def test_what_no_stage_accounts_for_is_orchestration() -> None:
    assert orchestration_seconds(RUN) == 1 + (1 + 1) + 0
