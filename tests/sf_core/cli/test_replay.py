"""A stored step is repeated without sampling and writing, with an equal result."""

from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.cli.replay import replay
from storage import files
from storage.run_directory import RunDirectory
from storage.tensors.weights import (
    ADAPTER_CONFIG,
    load_adapter,
    load_weights,
    remove_weights,
    save_adapter,
    save_weights,
)
from tests import bench
from tests.bench import runs
from tests.bench.commands import sf

BATCHES = [
    bench.training.batches.make_batch(
        bench.training.batches.grouped_rows(num_groups=16, group_size=4),
        logprob=-4.0,
        group_size=4,
        seed=seed,
    )
    for seed in range(4)
]


@pytest.fixture(scope="module")
def run_to_replay(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    settings = {"iterations": 4, "checkpoint_every": 2, "minibatches": 2, "warmup_steps": 3}
    return bench.trained_runs.train_run(tmp_path_factory.mktemp("runs"), settings, BATCHES)


@pytest.fixture
def copy(run_to_replay: RunDirectory, tmp_path: Path) -> RunDirectory:
    return runs.copy_run(run_to_replay, tmp_path)


@pytest.mark.parametrize("iteration", range(4))
def test_a_step_comes_out_equal_with_and_without_a_checkpoint_just_before_it(
    run_to_replay: RunDirectory, iteration: int
) -> None:
    result = replay(run_to_replay.uri, iteration)
    assert (result.equal, result.largest_difference, result.metrics) == (True, 0.0, {})


def test_a_step_has_the_settings_that_it_was_made_with(
    copy: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    runs.configure(copy, train={"checkpoint_every": 2, "learning_rate": 1e-2, "betas": (0.5, 0.5)})
    result = replay(copy.uri, 3)
    assert "version 3 is computed again from version 2 (train steps: 1)" in caplog.text
    assert (result.equal, result.metrics) == (True, {})


def test_a_step_of_a_gpu_is_not_done_again_where_none_is(
    copy: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = copy.read_manifest(0, "train")
    assert manifest is not None
    changed = manifest.model_copy(update={"data": manifest.data | {"device": "cuda"}})
    files.write_atomic(copy.manifest_file(0, "train"), changed.model_dump_json().encode())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, output = sf("replay", copy.uri, "--iteration", "0")
    assert (code, "was trained on a GPU, but this machine has none" in output) == (2, True)


def test_nothing_is_written_into_the_run(run_to_replay: RunDirectory) -> None:
    def content() -> dict[str, tuple[int, bytes]]:
        paths = [path for path in Path(run_to_replay.uri).rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}

    before = content()
    code, output = sf("replay", run_to_replay.uri, "--iteration", "1")
    assert code == 0 and output.endswith("iteration 1: the weights are equal, bit for bit")
    assert content() == before


def test_other_weights_are_told_by_how_much(copy: RunDirectory) -> None:
    manifest = copy.read_manifest(0, "train")
    assert manifest is not None
    weights = load_weights(copy.weights_dir(1))
    name = next(iter(weights))
    weights[name].view(-1)[0] += 0.5
    ref = copy.relative(save_weights(copy.weights_dir(1), weights, 1)[0])
    changed = manifest.model_copy(update={"outputs": [ref]})
    files.write_atomic(copy.manifest_file(0, "train"), changed.model_dump_json().encode())
    code, output = sf("replay", copy.uri, "--iteration", "0")
    assert code == 1 and output.endswith("the weights differ, by at most 0.5")
    files.remove_folder(copy.weights_dir(1))
    code, output = sf("replay", copy.uri, "--iteration", "0")
    assert code == 1 and output.endswith("the weights differ, the stored weights were removed")


def test_weights_that_are_gone_are_compared_by_their_checksum(copy: RunDirectory) -> None:
    files.remove_folder(copy.weights_dir(1))
    result = replay(copy.uri, 0)
    assert (result.equal, result.largest_difference) == (True, None)


def test_steps_whose_weights_are_bfloat16_come_out_equal(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "rounded"))
    policy = {"hidden_size": 32, "num_layers": 1, "warmstart": None, "dtype": "bfloat16"}
    bench.trained_runs.train(run, runs.configure(run, policy=policy, train={"iterations": 2}), BATCHES[:2])
    result = replay(run.uri, 1)
    assert (result.equal, result.largest_difference) == (True, 0.0)
    files.remove_folder(run.weights_dir(2))
    result = replay(run.uri, 1)
    assert (result.equal, result.largest_difference) == (True, None)


def test_an_iteration_that_is_not_there_is_named(run_to_replay: RunDirectory) -> None:
    code, output = sf("replay", run_to_replay.uri, "--iteration", "4")
    assert code == 2
    assert "trained: the stage train of iteration 4 is not committed; `sf inspect " in output


def test_a_damaged_batch_is_named(copy: RunDirectory) -> None:
    batch = f"{copy.partition('batches', 0)}/batch-1.parquet"
    files.write_atomic(batch, files.read_bytes(batch)[:-1])
    code, output = sf("replay", copy.uri, "--iteration", "0")
    assert code == 2 and "filter of iteration 0 wrote" in output


def test_an_emulated_step_is_not_done_again(copy: RunDirectory) -> None:
    runs.configure(copy, engine={"kind": "emulated"})
    code, output = sf("replay", copy.uri, "--iteration", "0")
    assert (code, "trained: the run is emulated and has no weights" in output) == (2, True), output


def test_a_step_of_an_adapter_comes_out_equal_even_if_its_weights_are_gone(tmp_path: Path) -> None:
    settings = {"iterations": 2, "lora": {"rank": 2}}
    run = bench.trained_runs.train_run(tmp_path, settings, BATCHES[:2])
    for iteration in range(2):
        result = replay(run.uri, iteration)
        assert (result.equal, result.largest_difference, result.metrics) == (True, 0.0, {})
    factors = load_adapter(run.weights_dir(1))
    about = Path(run.weights_dir(1), ADAPTER_CONFIG).read_bytes()
    save_adapter(run.weights_dir(1), {name: 2 * factor for name, factor in factors.items()}, about, 1)
    assert replay(run.uri, 0).equal is False
    remove_weights(run.weights_dir(1))
    result = replay(run.uri, 0)
    assert (result.equal, result.largest_difference) == (True, None)
