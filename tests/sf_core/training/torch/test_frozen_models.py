"""Models that are held beside the policy and not trained: loaded once, the same ones, in their own dtype."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.config.run_config import DtypeName
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.teacher_folder import find_teacher
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.ranks import Ranks, SingleRank
from sf_core.training.torch.teaching import FrozenModels, Name
from sf_core.training.torch.torch_model import FrozenModel, TorchModel
from sf_core.training.torch.trained_model import DistributedModel, TrainedModel
from storage.run_directory import RunDirectory
from tests.bench import trained_runs, training
from tests.bench.runs import configure

(MICROBATCH,) = pack(read_rows(trained_runs.BATCHES[0]), Packing(1 << 20))


def scores_of(model: DistributedModel) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []

    def note(_: Any, *scores: torch.Tensor) -> torch.Tensor:
        found.extend(scores)
        return scores[0].sum()

    model.forward([MICROBATCH], note)
    return tuple(found)


@pytest.mark.parametrize("has_adapter", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "make", [training.policies.llama, training.policies.neox], ids=["lean", "transformers"]
)
def test_it_says_what_the_trained_model_does_bit_for_bit(
    tmp_path: Path, make: Any, dtype: DtypeName, has_adapter: bool
) -> None:
    folder = training.adapters.save_with_adapter(make, str(tmp_path))
    adapter = training.adapters.adapter_of(folder) if has_adapter else None
    trained = TorchModel(folder, SingleRank(), dtype=dtype, adapter=adapter)
    frozen = FrozenModel(folder, SingleRank(), dtype=dtype, adapter=adapter)
    for one, other in zip(scores_of(frozen), scores_of(trained), strict=True):
        assert torch.equal(one, other) and not one.requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_has_the_dtype_of_its_folder_and_every_weight_once(tmp_path: Path, dtype: DtypeName) -> None:
    model = training.policies.qwen(vocab_size=4096, hidden_size=128).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    size = sum(parameter.numel() for parameter in model.parameters())
    frozen = FrozenModel(str(tmp_path), SingleRank(), dtype="auto")
    held = list(frozen.network.model.parameters())
    assert {parameter.dtype for parameter in held} == {getattr(torch, dtype)}
    # norms are fused and stay beside that
    assert size <= sum(parameter.numel() for parameter in held) < 1.02 * size
    assert not any(parameter.requires_grad for parameter in held)


class Nothing:
    """A model that counts how often it rests and wakes."""

    num_shares = 1
    share = 0
    measures = True
    reads_tries = True
    rests = 0
    wakes = 0

    def forward(self, microbatches: Any, loss: Any) -> None:
        raise NotImplementedError

    def rest(self) -> None:
        self.rests += 1

    def wake(self) -> None:
        self.wakes += 1


def count_loads(*, keeps: bool = True) -> tuple[FrozenModels, list[Name]]:
    loaded: list[Name] = []

    def load(name: Name, _: TrainedModel) -> tuple[DistributedModel, str]:
        loaded.append(name)
        return Nothing(), f"digest of {name}"

    return FrozenModels(load, keeps=keeps), loaded


def test_each_is_loaded_when_it_is_needed_and_stays_until_another_takes_its_place() -> None:
    models, loaded = count_loads()
    trained: Any = None
    first = models.model_of("reference", 0, trained)
    assert models.model_of("reference", 0, trained) is first and loaded == [0]
    # the teacher may be the reference
    assert models.model_of("teacher", 0, trained) is first and loaded == [0]
    second = models.model_of("reference", 2, trained)
    assert second is not first and models.model_of("teacher", 0, trained) is first and loaded == [0, 2]
    models.model_of("teacher", "folder", trained)
    assert models.digest_of("folder") == "digest of folder" and models.digest_of(0) == ""
    assert models.model_of("reference", 2, trained) is second and loaded == [0, 2, "folder"]


def test_what_is_held_rests_and_wakes() -> None:
    models, _ = count_loads()
    trained: Any = None
    held: Any = [models.model_of("reference", 0, trained), models.model_of("teacher", "folder", trained)]
    models.rest()
    models.wake()
    models.rest()
    assert [(one.rests, one.wakes) for one in held] == [(2, 1), (2, 1)]


def test_a_backend_that_keeps_none_loads_each_again() -> None:
    models, loaded = count_loads(keeps=False)
    trained: Any = None
    for _ in range(2):
        models.model_of("reference", 0, trained)
    assert loaded == [0, 0]


# --- those of a run


class CountingBackend(TorchBackend):
    def __init__(self) -> None:
        super().__init__(WorkerDevice())
        self.made: list[FrozenModel] = []

    def make_frozen(
        self, config: RunConfig, model_dir: str, ranks: Ranks, device: str, **choices: Any
    ) -> DistributedModel:
        made = super().make_frozen(config, model_dir, ranks, device, **choices)
        assert isinstance(made, FrozenModel)
        self.made.append(made)
        return made


@pytest.fixture
def taught(tmp_path: Path) -> Callable[..., OpenRun]:
    """Begins a run with these settings of `train`."""

    def begin(**train: Any) -> OpenRun:
        run = RunDirectory(str(tmp_path / f"run-{len(list(tmp_path.iterdir()))}"))
        trained_runs.start(run, configure(run, train=train))
        return OpenRun(RunRef(run.run_id, run.uri, dataplane_url="", attempt=0))

    return begin


def step(backend: TorchBackend, run: OpenRun, version: int) -> tuple[dict[str, float], str]:
    with backend.trainer_at(run, version, SingleRank()) as trainer:
        return trainer.step(trained_runs.BATCHES[version]), trainer.teacher_digest


@pytest.mark.parametrize("divergence", ["reverse", "sampled"])
def test_a_version_of_another_run_teaches_and_is_loaded_once(
    trained_run: RunDirectory, taught: Callable[..., OpenRun], divergence: str
) -> None:
    name = f"{trained_run.uri}@3"
    backend = CountingBackend()
    run = taught(advantage="none", teacher={"model": name, "divergence": divergence})
    for version in range(3):
        metrics, digest = step(backend, run, version)
        assert metrics["teacher_kl"] != 0 and digest == find_teacher(name).digest()
        backend.rest()
    assert len(backend.made) == 1


def test_version_0_is_the_teacher_and_the_reference_at_once(taught: Callable[..., OpenRun]) -> None:
    backend = CountingBackend()
    kl = {"coefficient": 0.1}
    run = taught(teacher={"weights": "start"}, loss={"kl": kl})
    metrics, digest = step(backend, run, 0)
    assert metrics["teacher_kl"] == metrics["kl_reference"] == 0 and digest == ""
    metrics, _ = step(backend, run, 1)
    assert metrics["teacher_kl"] > 0 and len(backend.made) == 1


def test_with_an_adapter_the_start_takes_no_second_network(taught: Callable[..., OpenRun]) -> None:
    backend = CountingBackend()
    run = taught(teacher={"weights": "start"}, lora={"rank": 4})
    assert step(backend, run, 0)[0]["teacher_kl"] == 0 and step(backend, run, 1)[0]["teacher_kl"] > 0
    assert backend.made == []


def test_a_teacher_of_an_adapter_run_is_its_start_with_the_adapter(
    taught: Callable[..., OpenRun], tmp_path: Path
) -> None:
    adapted = trained_runs.train_run(
        tmp_path / "adapted", {"iterations": 4, "lora": {"rank": 4}}, trained_runs.BATCHES
    )
    teacher = find_teacher(f"{adapted.uri}@3")
    backend = CountingBackend()
    step(backend, taught(advantage="none", teacher={"model": f"{adapted.uri}@3"}), 0)
    with teacher.open() as (folder, adapter):
        expected = TorchModel(folder, SingleRank(), adapter=adapter)
    for one, other in zip(scores_of(backend.made[0]), scores_of(expected), strict=True):
        assert torch.equal(one, other)


def test_another_model_than_the_one_that_taught_is_refused(trained_run: RunDirectory, tmp_path: Path) -> None:
    folder = str(tmp_path / "teacher")
    shutil.copytree(trained_run.start_dir, folder)
    settings = {"iterations": 4, "checkpoint_every": 4, "teacher": {"model": folder}}
    run = trained_runs.train_run(tmp_path, settings, trained_runs.BATCHES)
    manifest = run.read_manifest(0, "train")
    assert manifest is not None and manifest.data["teacher"] == find_teacher(folder).digest()
    opened = OpenRun(RunRef(run.run_id, run.uri, dataplane_url="", attempt=1))
    # steps that were made already are made again with it, bit for bit
    again = TorchBackend(WorkerDevice()).rebuild_trainer(opened, 3, SingleRank(), "cpu")
    assert again.version == 3
    for path in Path(trained_run.version_dir(1)).glob("*.safetensors"):
        shutil.copy(path, folder)
    with pytest.raises(ValueError, match=rf"^train.teacher.model: {folder} is not the model that taught "):
        TorchBackend(WorkerDevice()).rebuild_trainer(opened, 3, SingleRank(), "cpu")
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=rf"{folder} does not exist"):
        TorchBackend(WorkerDevice()).rebuild_trainer(opened, 3, SingleRank(), "cpu")


class OtherRanks(SingleRank):
    """Ranks of which another one found something else."""

    def __init__(self, other: tuple[str, str]) -> None:
        self._other = other

    def gather(self, value: Any) -> list[Any]:
        is_teacher = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
        return [value, self._other] if is_teacher else [value]


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (("another digest", ""), "is not the same model on every training worker$"),
        (("", "train.teacher.model: folder does not exist"), "^train.teacher.model: folder does not exist$"),
    ],
)
def test_what_another_rank_finds_ends_the_step_on_all(
    trained_run: RunDirectory, taught: Callable[..., OpenRun], other: tuple[str, str], sentence: str
) -> None:
    run = taught(advantage="none", teacher={"model": trained_run.start_dir})
    backend = CountingBackend()
    trainer = backend.rebuild_trainer(run, 0, OtherRanks(other), "cpu")
    with pytest.raises(ValueError, match=sentence):
        trainer.step(trained_runs.BATCHES[0])
