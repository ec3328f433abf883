from sf_core.iterations import iteration_windows
from sf_core.summary import orchestration_seconds
from storage.manifests import Manifest


def iteration(attempt: int, *stages: tuple[str, float, float]) -> dict[str, Manifest]:
    return {
        name: Manifest(
            run_id="r",
            iteration=0,
            stage=name,
            attempt=attempt,
            data={"started_at": start, "finished_at": end},
        )
        for name, start, end in stages
    }


RUN = [
    iteration(1, ("rollout", 10, 12), ("train", 13, 15), ("publish", 15, 16)),
    iteration(1, ("evaluate", 17, 19), ("rollout", 18, 20), ("train", 20, 24), ("publish", 25, 26)),
    iteration(2, ("rollout", 100, 101), ("train", 101, 102), ("publish", 102, 103)),
]


def test_iterations_follow_each_other_without_a_gap_except_between_attempts() -> None:
    assert iteration_windows(RUN) == [(10, 16), (16, 26), (100, 103)]


def test_what_no_stage_accounts_for_is_orchestration() -> None:
    assert orchestration_seconds(RUN) == 1 + (1 + 1) + 0
