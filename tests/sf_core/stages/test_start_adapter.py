"""Version 0 of a run that trains an adapter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sf_core.config import RunConfig
from sf_core.models.adapter import Adapter, list_linears, make_factors, read_adapter, shape_factors
from sf_core.stages.run import RunRef
from sf_core.stages.settling.derived import read_with_derived
from sf_core.stages.start import start
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights, open_weights, save_adapter
from tests.bench.runs import configure

ALL = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def started(run: RunDirectory) -> dict[str, Any]:
    return start(RunRef(run.run_id, run.uri, dataplane_url="", attempt=1))


def begin(tmp_path: Path, name: str = "run", **sections: Any) -> RunDirectory:
    run = RunDirectory(str(tmp_path / name))
    configure(run, storage={"root": str(tmp_path)}, **sections)
    return run


def save_tuned(folder: Path, model: Path, rank: int = 2, dtype: str | None = "bfloat16") -> Adapter:
    """An adapter of the model as another program has trained it."""
    adapter = Adapter(rank, 6.0, ("o_proj", "q_proj"))
    shapes = shape_factors(adapter, list_linears(str(model)))
    factors = {name: torch.randn(*shape) for name, shape in shapes.items()}
    save_adapter(str(folder), factors, adapter.encode("somewhere/else"), 7, dtype)
    return adapter


def test_an_adapter_is_made_that_changes_nothing_yet(tmp_path: Path) -> None:
    run = begin(tmp_path, train={"lora": {}}, seed=5)
    data = started(run)
    assert started(run) == data
    adapter, linears = read_adapter(run.start_adapter_dir), list_linears(run.start_dir)
    assert adapter == Adapter(32, 64.0, ALL)
    shapes = shape_factors(adapter, linears)
    factors = load_weights(run.version_dir(0))
    expected = make_factors(shapes, 5)
    assert factors.keys() == expected.keys()
    assert all(torch.equal(factors[name], expected[name]) for name in expected)
    assert data["adapter"] == {
        "rank": 32,
        "alpha": 64.0,
        "targets": [*ALL],
        "parameters": sum(factor.numel() for factor in factors.values()),
    }
    metadata = open_weights(run.start_adapter_dir)[0].metadata
    assert metadata["version"] == "0" and metadata["digest"]


def test_what_was_settled_is_read_with_the_configuration(tmp_path: Path) -> None:
    run = begin(tmp_path, train={"lora": {"targets": ["q_proj"]}})
    started(run)
    config = read_with_derived(run)
    assert config.train.lora is not None
    assert (config.train.lora.rank, config.train.lora.alpha) == (32, 64.0)
    assert config.train.learning_rate == 3e-3


def test_runs_of_other_seeds_start_from_other_adapters(tmp_path: Path) -> None:
    first, second, third = (
        begin(tmp_path, f"run-{n}", train={"lora": {"rank": 1}}, seed=seed)
        for n, seed in enumerate((0, 0, 1))
    )
    digests = []
    for run in (first, second, third):
        started(run)
        digests.append(open_weights(run.start_adapter_dir)[0].metadata["digest"])
    assert digests[0] == digests[1] != digests[2]


def test_an_adapter_that_was_tuned_before_is_copied_as_it_is(tmp_path: Path, policy_copy: Path) -> None:
    tuned = tmp_path / "tuned"
    adapter = save_tuned(tuned, policy_copy)
    (tuned / "optimizer.pt").write_bytes(b"not ours")
    policy = {"model": str(policy_copy), "adapter": str(tuned)}
    run = begin(tmp_path, policy=policy, train={"lora": {}})
    data = started(run)
    assert (data["adapter"]["rank"], data["adapter"]["targets"]) == (2, ["o_proj", "q_proj"])
    assert read_adapter(run.start_adapter_dir) == adapter
    assert sorted(path.name for path in Path(run.start_adapter_dir).iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    before, copied = load_weights(str(tuned)), load_weights(run.start_adapter_dir)
    assert before.keys() == copied.keys() and {t.dtype for t in copied.values()} == {torch.bfloat16}
    assert all(torch.equal(before[name], copied[name]) for name in before)
    assert open_weights(run.start_adapter_dir)[0].metadata["version"] == "0"


def test_peft_reads_what_the_start_stage_has_written(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run = begin(tmp_path, train={"lora": {"rank": 3}})
    started(run)
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(run.start_dir), run.start_adapter_dir
    )
    assert {name for name, _ in model.named_parameters() if "lora_A" in name}


def test_a_changed_adapter_is_no_version_0(tmp_path: Path) -> None:
    run = begin(tmp_path, train={"lora": {"rank": 1}})
    started(run)
    about = Path(run.start_adapter_dir, "adapter_config.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"lora_alpha": 65}, indent=2))
    with pytest.raises(
        ValueError, match=r"start/adapter/adapter_config\.json: content differs from what sta"
    ):
        started(run)


def test_a_start_folder_that_is_made_again_has_a_new_adapter(tmp_path: Path) -> None:
    run = begin(tmp_path, train={"lora": {"rank": 1}})
    started(run)
    run.discard_start()
    assert run.version_dir(0) == run.start_dir
    run.write_config(RunConfig.model_validate_json(Path(run.path("config.json")).read_text()))
    started(run)
    assert run.version_dir(0) == run.start_adapter_dir


def test_a_run_of_all_weights_has_no_adapter(tmp_path: Path) -> None:
    run = begin(tmp_path)
    data = started(run)
    assert "adapter" not in data and not any(key.startswith("train.lora") for key in data["derived"])
    assert run.version_dir(0) == run.start_dir
