from sf_core.iterations import Iteration, iteration_windows
from sf_core.summary import orchestration_seconds
from storage.manifests import Manifest


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


def test_what_no_stage_accounts_for_is_orchestration() -> None:
    assert orchestration_seconds(RUN) == 1 + (1 + 1) + 0
