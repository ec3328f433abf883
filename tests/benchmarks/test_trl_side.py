"""TRL's report is built from warm steps only."""

from benchmarks.trl_side import WARMUP_STEPS, summarise


def test_warmup_steps_do_not_enter_the_rates() -> None:
    cold = {"wall_s": 100.0, "cpu_s": 100.0, "prompt_tokens": 10.0, "completion_tokens": 10.0}
    warm = [
        cold | {"wall_s": 2.0, "completion_tokens": 30.0},
        cold | {"wall_s": 4.0, "completion_tokens": 60.0},
    ]

    report = summarise([cold] * WARMUP_STEPS + warm, cores=2)

    assert report["seconds_per_step"] == 3.0
    assert report["tokens_per_second"] == 15.0
    assert len(report["steps"]) == WARMUP_STEPS + 2
