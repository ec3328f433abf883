"""Folders whose weights are not all those of their architecture are refused where they are first read, by
every reader. Transformers would draw what is missing at random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sf_core.cli.explain import explain_plan
from sf_core.cli.serving.policy import open_stored, policy_to_try
from sf_core.config import RunConfig
from sf_core.engines.torch.cached_model import open_model
from sf_core.stages.evaluate import open_evaluation, open_measurement
from sf_core.stages.lease import open_judges
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from sf_core.stages.run import RunRef
from sf_core.stages.start import start
from sf_core.training.teacher_folder import find_teacher
from sf_core.training.torch.network import Network
from sf_core.types import Task
from storage.run_directory import RunDirectory
from tests import bench
from tests.bench import refusals
from tests.bench.policy_server import publish_run

FILE = "model.safetensors"
LAYER = "model.layers.1."


def score(task: Task, answer: Any, judges: Any) -> float:
    return 0.0


def change(folder: Path, changed: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(changed(load_file(folder / FILE)), folder / FILE, {"format": "pt"})


def lose_layer(folder: Path) -> None:
    change(folder, lambda weights: {n: t for n, t in weights.items() if not n.startswith(LAYER)})


def add(prefix: str) -> Callable[[Path], None]:
    return lambda folder: change(folder, lambda weights: {prefix + n: t for n, t in weights.items()})


def compile_layers(folder: Path) -> None:
    change(folder, lambda weights: {n.replace(LAYER, f"{LAYER}_orig_mod."): t for n, t in weights.items()})


def widen(folder: Path) -> None:
    name = f"{LAYER}mlp.up_proj.weight"
    change(folder, lambda weights: weights | {name: torch.cat([weights[name]] * 2)})


def lose_shard(folder: Path) -> None:
    shards = {n: f"model-{int(n.startswith(LAYER))}.safetensors" for n in load_file(folder / FILE)}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": shards}), encoding="utf-8"
    )
    lose_layer(folder)
    (folder / FILE).rename(folder / "model-0.safetensors")


def cut(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-100])


FAULTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "a layer": (
        lose_layer,
        (
            "lacks 11 of the 24 weights that a qwen3 model needs (model.layers.1.mlp.up_proj.weight, ",
            ", ...)",
        ),
    ),
    "torch.compile": (
        add("_orig_mod."),
        ("contain '_orig_mod.', which torch.compile adds", "strip '_orig_mod.' from the names", "save_file("),
    ),
    "torch.compile of layers": (
        compile_layers,
        ("'_orig_mod.', which torch.compile adds", "so 11 of "),
    ),
    "DDP": (add("module."), ("contain 'module.', which DistributedDataParallel adds", "strip 'module.'")),
    "another prefix": (add("policy.net."), ("contain 'policy.net.', so 24 of the 24 weights",)),
    "shape": (
        widen,
        ("another shape of 1 of the 24 weights", "model.layers.1.mlp.up_proj.weight has [", "expected ["),
    ),
    "shard": (lose_shard, ("model-1.safetensors: no such file",)),
    "truncated": (cut, (f"{FILE}: not a complete safetensors file",)),
}
EACH_FAULT = pytest.mark.parametrize("fault", FAULTS)


@pytest.fixture
def model(two_layer_policy: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_layer_policy, tmp_path / "model"))


def settings(tmp_path: Path, **sections: Any) -> RunConfig:
    return bench.runs.configure(
        RunDirectory(str(tmp_path / "r")), storage={"root": str(tmp_path)}, **sections
    )


def begin(tmp_path: Path, model: Path) -> None:
    settings(tmp_path, policy={"model": str(model)})
    start(RunRef("r", str(tmp_path / "r"), dataplane_url="", attempt=1))


def check_with(policy: dict[str, Any] | None = None, **sections: Any) -> Callable[[Path, Path], Any]:
    def check(tmp_path: Path, model: Path) -> None:
        preflight(Facts(settings(tmp_path, policy={"model": str(model)} | (policy or {}), **sections)))

    return check


def judged(tmp_path: Path, model: Path) -> None:
    asked = {"judges": {"quality": {"model": str(model)}}, "reward": f"{__name__}:score"}
    preflight(Facts(settings(tmp_path, environment=asked)))


def judge_of_a_worker(tmp_path: Path, model: Path) -> None:
    asked = {"judges": {"quality": {"model": str(model)}}, "reward": f"{__name__}:score"}
    with open_judges(settings(tmp_path, environment=asked).environment, "reward"):
        pass


GAE = {"advantage": "gae", "critic": {}}
READERS: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "policy": ("policy.model: ", check_with()),
    "plan": (
        "policy.model: ",
        lambda tmp_path, model: explain_plan(settings(tmp_path, policy={"model": str(model)})),
    ),
    "start": ("policy.model: ", begin),
    "base of an adapter": ("policy.model: ", check_with(train={"lora": {}})),
    "warm start": ("policy.model: ", check_with({"warmstart": {"steps": 1}})),
    "critic": ("policy.model: ", check_with(train=GAE)),
    "reference": ("policy.model: ", check_with(train={"loss": {"kl": {"coefficient": 0.1}}})),
    "teacher": (
        "train.teacher.model: ",
        lambda tmp_path, model: preflight(
            Facts(settings(tmp_path, train={"teacher": {"model": str(model)}}))
        ),
    ),
    "judge": ("environment.judges.quality.model: ", judged),
    "judge of a worker": ("environment.judges.quality.model: ", judge_of_a_worker),
    "try": (
        "policy.model: ",
        lambda tmp_path, model: policy_to_try(
            RunConfig.model_validate({"policy": {"model": str(model)}}), tmp_path
        ),
    ),
}


@EACH_FAULT
@pytest.mark.parametrize("reader", READERS)
def test_a_folder_that_lacks_weights_is_refused_before_anything_starts(
    tmp_path: Path, model: Path, reader: str, fault: str
) -> None:
    setting, read = READERS[reader]
    if "judge" in reader:
        (model / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    damage, names = FAULTS[fault]
    damage(model)
    with refusals.clear_refusal(setting, str(model), *names):
        read(tmp_path, model)
    assert not Path(tmp_path, "r", "start").exists()


@EACH_FAULT
def test_the_command_that_checks_a_folder_finds_what_it_lacks(
    tmp_path: Path, model: Path, fault: str
) -> None:
    damage, names = FAULTS[fault]
    damage(model)
    bench.commands.check_refused(tmp_path, ["model", str(model)], str(model), *names)


def named(run: RunDirectory) -> RunConfig:
    stored = run.read_config(RunConfig)
    return stored.model_copy(update={"run_id": run.run_id})


def resume_with_reference(run: RunDirectory) -> None:
    stored = run.read_config(RunConfig)
    loss = {"kl": {"coefficient": 0.1, "renew_every": 2}}
    train = stored.train.model_dump(exclude_unset=True) | {"loss": loss}
    preflight(Facts(RunConfig.model_validate(named(run).model_dump(exclude_unset=True) | {"train": train})))


OF_A_RUN: dict[str, Callable[[RunDirectory], Any]] = {
    "resume": lambda run: preflight(Facts(named(run))),
    "reference": resume_with_reference,
    "serve": lambda run: open_stored(run.uri, 3),
    "evaluate": lambda run: open_evaluation(named(run)),
    "evaluate apart": lambda run: open_measurement(run.uri, 3, []).begin(),
    "teacher": lambda run: find_teacher(f"{run.uri}@3"),
}


@EACH_FAULT
@pytest.mark.parametrize("reader", OF_A_RUN)
def test_a_version_of_a_run_that_lacks_weights_is_not_read(tmp_path: Path, reader: str, fault: str) -> None:
    run = publish_run(tmp_path, num_layers=2)
    damage, names = FAULTS[fault]
    damage(Path(run.weights_dir(3)))
    with refusals.clear_refusal(run.weights_dir(3), *names):
        OF_A_RUN[reader](run)


@EACH_FAULT
def test_a_run_does_not_go_on_from_a_start_that_lacks_weights(tmp_path: Path, fault: str) -> None:
    run = publish_run(tmp_path, num_layers=2)
    damage, names = FAULTS[fault]
    damage(Path(run.start_dir))
    with refusals.clear_refusal(f"run {run.run_id}: ", run.start_dir, *names):
        preflight(Facts(named(run)))


@pytest.mark.parametrize("read", ["trainer", "engine"])
@pytest.mark.parametrize("fault", ["a layer", "torch.compile"])
def test_who_reads_weights_at_last_does_not_draw_what_is_missing(model: Path, fault: str, read: str) -> None:
    damage, names = FAULTS[fault]
    damage(model)
    with refusals.clear_refusal(str(model), *names):
        if read == "trainer":
            Network(str(model))
        else:
            cpu = torch.device("cpu")
            open_model(str(model), str(model), context_length=64, dtype=torch.float32, device=cpu)


def test_a_quantised_judge_is_compared_by_its_modules(tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    shape = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(
        json.dumps(shape | {"quantization_config": {"quant_method": "awq"}}), encoding="utf-8"
    )

    def code(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n.replace("proj.weight", "proj.qweight"): t for n, t in weights.items()}

    change(model, code)
    judged_settings = {"judges": {"quality": {"model": str(model)}}, "reward": f"{__name__}:score"}
    found: list[str] = []
    for _ in range(2):
        try:
            preflight(Facts(settings(tmp_path, environment=judged_settings)))
        except (ValueError, OSError) as error:
            found.append(str(error))
        lose_layer(model)
    # this machine may have no vLLM, which is told after the folders
    assert not any("lacks" in told for told in found[:-1])
    refusals.check_sentence(found[-1], "environment.judges.quality.model: ", "lacks 11 of the 24 weights")
