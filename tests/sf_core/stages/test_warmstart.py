from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.config import PolicyConfig, RunConfig
from sf_core.config.yaml_file import load_config
from sf_core.models.builtin import make_policy
from sf_core.models.images.processor_config import read_image_processor
from sf_core.stages.run import OpenRun, RunRef
from sf_core.stages.warmstart import MOST_STEPS, _write_demonstrations, configure_warmstart
from storage.files import list_files
from storage.media import media_file, read_image
from storage.run_directory import RunDirectory
from storage.tables.batches import read_batch
from storage.tables.trajectories import images_of
from tests.bench.runs import configure

CONFIGS = sorted(Path("configs").glob("*.yaml"))


def warmed(config: RunConfig, steps: int, rate: float | None = None) -> RunConfig:
    policy = {"model": "m", "warmstart": {"steps": steps, "batch_size": 4, "learning_rate": rate}}
    data = config.model_dump(mode="json") | {"policy": policy, "run_id": "r"}
    return RunConfig.model_validate(data)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_warm_start_of_any_run_has_valid_settings(path: Path) -> None:
    config = warmed(load_config(path), 12)
    nested = configure_warmstart(config, 135_000_000)
    assert RunConfig.model_validate(nested.model_dump(mode="json")) == nested
    assert nested.run_dir == f"{config.run_dir}/warmstart" or not config.run_dir.startswith("/")


@given(st.integers(1, 500))
def test_iterations_of_at_most_ten_steps_make_up_all_steps(steps: int) -> None:
    train = configure_warmstart(warmed(RunConfig(), steps), None).train
    assert train.iterations * train.minibatches == steps and train.minibatches <= MOST_STEPS


def test_the_learning_rate_is_five_times_that_of_the_run_unless_it_is_named() -> None:
    config = warmed(RunConfig(), 2)
    assert configure_warmstart(config, 135_000_000).train.learning_rate == pytest.approx(1e-4)
    named = config.model_copy(update={"train": config.train.model_copy(update={"learning_rate": 1e-5})})
    assert configure_warmstart(named, 135_000_000).train.learning_rate == pytest.approx(5e-5)
    assert configure_warmstart(warmed(RunConfig(), 2, rate=1e-3), 1).train.learning_rate == 1e-3


def test_demonstrations_with_images_are_stored_once_and_named(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    shape = {"hidden_size": 32, "num_layers": 1}
    make_policy(run.start_dir, PolicyConfig(sees=True, **shape), seed=0)
    policy = {"model": run.start_dir, "warmstart": {"steps": 1, "batch_size": 3}}
    configure(
        run, policy=policy, environment={"name": "screen", "tasks": None, "agent": None, "reward": None}
    )
    written = _write_demonstrations(OpenRun(RunRef("run", run.uri, dataplane_url="", attempt=1)), 0)
    batch = read_batch(run.path(written.outputs[0].uri))
    spans = [span for row in images_of(batch) for span in row]
    assert written.data == {"rows": 3} and [len(row) for row in images_of(batch)] == [2] * 3
    assert {media_file(run.media_dir, span.sha256) for span in spans} == {*list_files(run.media_dir)}
    assert all(read_image(run.media_dir, span.sha256) for span in spans)
    placeholder = read_image_processor(run.start_dir).token_id
    for ids, row in zip(batch["token_ids"].to_pylist(), images_of(batch), strict=True):
        shown = [at for span in row for at in range(span.start, span.start + span.length)]
        assert [at for at, token in enumerate(ids) if token == placeholder] == shown
