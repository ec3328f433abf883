"""Small runs to compare."""

from pathlib import Path

from sf_core.config import RunConfig
from storage.run_directory import RunDirectory
from tests.bench.reports.report_runs import AT, commit_iteration, talk
from tests.bench.runs import commit


def make_run(folder: Path, name: str, rewards: list[float], **sections: object) -> RunDirectory:
    """A run of an iteration for each reward, and two evaluations of two tasks."""
    run = RunDirectory(str(folder / name))
    config = {"run_id": name, "train": {"iterations": 2}} | sections
    run.write_config(RunConfig.model_validate(config))
    for number, reward in enumerate(rewards):
        row = talk(f"{name}.g{number}.0.a1", "hello", "hi", [number], reward=reward)
        commit_iteration(run, number, [row], failures={"timeout": number})
    for version, held_out in ((0, 0.25), (len(rewards), 0.5)):
        commit(run, version, "evaluate", data={"reward_mean": held_out, "started_at": AT, "finished_at": AT})
    return run
