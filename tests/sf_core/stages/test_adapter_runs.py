"""The first version of an adapter, and the policy that a run which trains one leaves behind."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM

from sf_core.cli.serving.policy import policy_to_try
from sf_core.config import RunConfig
from sf_core.models.adapter import (
    Adapter,
    make_factors,
    merge,
    name_factor,
    read_adapter,
    shape_factors,
)
from sf_core.reports.html.page import render
from sf_core.reports.run_page import RunPage, show_text
from sf_core.reports.tables import inspect_run
from sf_core.reports.view import RunView
from sf_core.stages import evaluate
from sf_core.stages.evaluate import open_evaluation, open_measurement
from sf_core.stages.finish import export_policy
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from sf_core.stages.preflight.resolve import read_with_derived
from sf_core.stages.run import OpenRun, RunRef
from sf_core.stages.start import start
from sf_core.stages.warmstart import configure_warmstart
from sf_core.training.policy_folder import count_parameters
from storage.files import FileRef, copy_folder, remove
from storage.run_directory import RunDirectory
from storage.tensors.weights import has_weights, load_weights, open_weights, save_adapter, save_weights
from tests import bench
from tests.bench import refusals, runs

ALL = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def started(run: RunDirectory) -> dict[str, Any]:
    return start(RunRef(run.run_id, run.uri, dataplane_url="", attempt=1))


def begin(tmp_path: Path, name: str = "run", **sections: Any) -> RunDirectory:
    run = RunDirectory(str(tmp_path / name))
    runs.configure(run, storage={"root": str(tmp_path)}, **sections)
    return run


def save_tuned(folder: Path, model: Path, rank: int = 2, dtype: str | None = "bfloat16") -> Adapter:
    """An adapter of the model as another program has trained it."""
    adapter = Adapter(rank, 6.0, ("o_proj", "q_proj"))
    shapes = shape_factors(adapter, bench.engines.model_folders.linears_of(str(model)))
    factors = {name: torch.randn(*shape) for name, shape in shapes.items()}
    save_adapter(str(folder), factors, adapter.encode("somewhere/else"), 7, dtype)
    return adapter


def test_an_adapter_is_made_that_changes_nothing_yet(tmp_path: Path) -> None:
    run = begin(tmp_path, train={"lora": {}}, seed=5)
    data = started(run)
    assert started(run) == data
    adapter = read_adapter(run.start_adapter_dir)
    linears = bench.engines.model_folders.linears_of(run.start_dir)
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


def test_reports_say_which_adapter_is_trained(tmp_path: Path) -> None:
    run = begin(tmp_path, train={"lora": {"rank": 3, "targets": ["q_proj", "o_proj"]}})
    data = started(run)
    said = (
        f"An adapter of rank 3 (alpha 6) is trained: {data['adapter']['parameters']:,} parameters, "
        "factors of o_proj, q_proj."
    )
    view = RunView(run)
    assert view.describe_adapter() == said
    assert f'<p class="note">{said}</p>' in render(view, 1_000_000).decode()
    assert show_text(said) in RunPage(run).report()
    printed = io.StringIO()
    Console(width=200, file=printed).print(inspect_run(run.uri))
    assert said in printed.getvalue()


def test_what_was_resolved_is_read_with_the_configuration(tmp_path: Path) -> None:
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
    before = load_weights(str(tuned))
    copied = load_weights(run.start_adapter_dir)
    assert before.keys() == copied.keys() and {t.dtype for t in copied.values()} == {torch.bfloat16}
    assert all(torch.equal(before[name], copied[name]) for name in before)
    assert open_weights(run.start_adapter_dir)[0].metadata["version"] == "0"


def flip_a_bit(folder: str) -> None:
    file = Path(folder, "adapter_model.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def test_a_damaged_adapter_is_neither_begun_from_nor_merged(tmp_path: Path, policy_copy: Path) -> None:
    damaged = r"adapter_model\.safetensors: the tensors differ from those that were written"
    run, _ = trained(tmp_path, policy_copy, "float32", "float32")
    flip_a_bit(run.weights_dir(1))
    with pytest.raises(ValueError, match=damaged):
        export(run)
    policy = {"model": str(policy_copy), "adapter": run.weights_dir(1)}
    following = begin(tmp_path, "next", policy=policy, train={"lora": {}})
    with pytest.raises(ValueError, match=damaged):
        started(following)


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
    about.write_text(
        json.dumps(json.loads(about.read_text(encoding="utf-8")) | {"lora_alpha": 3}, indent=2),
        encoding="utf-8",
    )
    with pytest.raises(
        ValueError, match=r"start/adapter/adapter_config\.json: the content differs from what sta"
    ):
        started(run)


def test_a_start_folder_that_is_made_again_has_a_new_adapter(tmp_path: Path) -> None:
    run = begin(tmp_path, train={"lora": {"rank": 1}})
    started(run)
    run.discard_start()
    assert run.version_dir(0) == run.start_dir
    run.write_config(RunConfig.model_validate_json(Path(run.path("config.json")).read_text(encoding="utf-8")))
    started(run)
    assert run.version_dir(0) == run.start_adapter_dir


def test_a_run_of_all_weights_has_no_adapter(tmp_path: Path) -> None:
    run = begin(tmp_path)
    data = started(run)
    assert "adapter" not in data and not any(key.startswith("train.lora") for key in data["derived"])
    assert run.version_dir(0) == run.start_dir
    assert RunView(run).describe_adapter() == ""


def test_an_adapter_that_could_not_be_merged_in_the_end_is_not_begun(
    tmp_path: Path, policy_copy: Path
) -> None:
    weights = load_weights(str(policy_copy))
    name = "model.layers.0.self_attn.q_proj.weight"
    renamed = {key.replace("q_proj", "query"): tensor for key, tensor in weights.items()}
    save_weights(str(policy_copy), renamed, 0)
    run = begin(tmp_path, policy={"model": str(policy_copy)}, train={"lora": {}})
    with refusals.clear_refusal(
        "policy.model: ", f"lacks 1 of the 13 weights that a qwen3 model needs ({name})"
    ):
        started(run)


def trained(tmp_path: Path, model: Path, dtype: str, stored: str) -> tuple[RunDirectory, Adapter]:
    """A run with a published version of an adapter."""
    save_weights(str(model), load_weights(str(model)), 0, stored)
    lora = {"rank": 3, "alpha": 5, "targets": ["q_proj", "down_proj"]}
    policy = {"model": str(model), "dtype": dtype}
    run = begin(tmp_path, policy=policy, train={"iterations": 1, "lora": lora})
    started(run)
    adapter = read_adapter(run.start_adapter_dir)
    factors = {name: torch.randn_like(t) for name, t in load_weights(run.start_adapter_dir).items()}
    save_adapter(run.weights_dir(1), factors, adapter.encode(str(model)), 1, dtype)
    runs.commit(run, 0, "rollout", data={"groups": [], "rejected": {}})
    runs.commit(run, 0, "publish")
    return run, adapter


def export(run: RunDirectory) -> None:
    export_policy(OpenRun(RunRef("run", run.uri, dataplane_url="", attempt=1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_trained_policy_is_merged_once(
    tmp_path: Path, policy_copy: Path, dtype: str, stored: str
) -> None:
    run, adapter = trained(tmp_path, policy_copy, dtype, stored)
    export(run)
    base = load_weights(run.start_dir)
    factors = load_weights(run.weights_dir(1))
    merged = load_weights(run.policy_dir)
    kind = getattr(torch, dtype)
    assert merged.keys() == base.keys() and {t.dtype for t in merged.values()} == {kind}
    for name, weight in base.items():
        up = factors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight")
        down = factors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
        expected = weight.to(kind)
        if up is not None and down is not None:
            added = expected.double() + adapter.scale * up.double() @ down.double()
            # half of the last place, and what float32 loses of a sum of `rank` products and the weight
            size = expected.double().abs() + adapter.scale * up.double().abs() @ down.double().abs()
            lost = (adapter.rank + 3) * torch.finfo(torch.float32).eps * size
            close = torch.finfo(kind).eps / 2 * added.abs() + lost
            assert ((merged[name].double() - added).abs() <= close).all()
            assert not torch.equal(merged[name], expected)
        else:
            assert torch.equal(merged[name], expected)
    copied = load_weights(run.policy_adapter_dir)
    assert all(torch.equal(copied[name], factor) for name, factor in factors.items())
    assert read_adapter(run.policy_adapter_dir) == adapter


def test_the_trained_policy_is_that_of_peft(tmp_path: Path, policy_copy: Path) -> None:
    peft = pytest.importorskip("peft")
    run, _ = trained(tmp_path, policy_copy, "float32", "float32")
    export(run)
    base = AutoModelForCausalLM.from_pretrained(run.start_dir)
    merged = peft.PeftModel.from_pretrained(base, run.policy_adapter_dir).merge_and_unload()
    ids = torch.arange(12).view(2, 6)
    with torch.inference_mode():
        expected = merged(input_ids=ids).logits
        found = AutoModelForCausalLM.from_pretrained(run.policy_dir)(input_ids=ids).logits
    bench.closeness.assert_rounded(found, expected, bench.closeness.FORWARD)


@pytest.mark.parametrize("again", [{}, {"lora": {"rank": 1}}])
def test_the_trained_policy_is_a_model_like_any_other(
    tmp_path: Path, policy_copy: Path, again: dict[str, Any]
) -> None:
    """What lies beside it is not taken for the adapter of the next run."""
    run, _ = trained(tmp_path, policy_copy, "float32", "float32")
    export(run)
    before = refusals.snapshot(Path(run.policy_dir))
    following = begin(tmp_path, "next", policy={"model": run.policy_dir}, train=again)
    preflight(Facts(following.read_config(RunConfig)))
    started(following)
    assert following.version_dir(0) == (following.start_adapter_dir if again else following.start_dir)
    assert not again or read_adapter(following.start_adapter_dir).rank == 1
    (tmp_path / "scratch").mkdir()
    served = policy_to_try(
        RunConfig.model_validate({"policy": {"model": run.policy_dir}, "train": again}), tmp_path / "scratch"
    )
    assert has_weights(served.weights.uri) and has_weights(served.start_dir)
    assert refusals.snapshot(Path(run.policy_dir)) == before


def test_an_adapter_that_is_not_there_is_not_tried(tmp_path: Path) -> None:
    config = {"policy": {"adapter": str(tmp_path / "nowhere")}, "train": {"lora": {}}}
    with pytest.raises(ValueError, match=r"policy\.adapter: .*nowhere does not contain an adapter"):
        policy_to_try(RunConfig.model_validate(config), tmp_path)


def test_a_version_of_an_adapter_is_measured_with_its_policy(tmp_path: Path, policy_copy: Path) -> None:
    run, adapter = trained(tmp_path, policy_copy, "float32", "float32")
    for version in (0, 1):
        measurement = open_measurement(run.uri, version, [])
        config = measurement.config
        measured = measurement.directory
        measurement.begin()
        assert measured.read_config(RunConfig) == config and config.train.lora is not None
        preflight(Facts(config))
        folder = measured.version_dir(0)
        assert folder == measured.start_adapter_dir and read_adapter(folder) == adapter
        factors = load_weights(folder)
        published = load_weights(run.version_dir(version))
        assert all(torch.equal(factors[name], published[name]) for name in published)
        base = load_weights(run.start_dir)
        assert all(torch.equal(t, base[name]) for name, t in load_weights(measured.start_dir).items())
        assert open_evaluation(config).version == 0
        manifest = measured.read_manifest(None, "start")
        assert manifest is not None
        measured.verify(manifest)
        measurement.end()
        assert not has_weights(measured.start_dir) and not has_weights(folder)


def test_a_version_that_is_removed_while_it_is_copied_is_not_measured(
    tmp_path: Path, policy_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained(tmp_path, policy_copy, "float32", "float32")
    measurement = open_measurement(run.uri, 1, [])

    def copy_late(*args: Any, **more: Any) -> list[FileRef]:
        # the first of what `remove_weights` removes
        remove(f"{run.weights_dir(1)}/adapter_model.safetensors")
        return copy_folder(*args, **more)

    monkeypatch.setattr(evaluate, "copy_folder", copy_late)
    with pytest.raises(ValueError, match="the weights of version 1 are not stored; stored versions: 0"):
        measurement.begin()
    assert measurement.directory.read_manifest(None, "start") is None


@given(
    rank=st.integers(1, 4),
    width=st.integers(1, 5),
    out=st.integers(1, 5),
    scale=st.floats(0.1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_merged_weights_are_those_of_the_model_with_the_factors_beside_it(
    rank: int, width: int, out: int, scale: float, dtype: torch.dtype, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    base, up, down, x = (
        torch.randn(*shape, generator=random)
        for shape in ((out, width), (out, rank), (rank, width), (3, width))
    )
    weights = {"a.weight": base, "b.weight": base}
    other = base.clone()
    merge(weights, {name_factor("a", "lora_A"): down, name_factor("a", "lora_B"): up}, scale, dtype)
    assert weights["b.weight"] is base and torch.equal(base, other)
    base, up, down = (tensor.to(dtype).double() for tensor in (base, up, down))
    expected = x.double() @ base.T + scale * (x.double() @ down.T) @ up.T
    size = base.abs() + scale * up.abs() @ down.abs()
    # half of the last place of each weight, and what float32 loses of a sum of `rank` products and the weight
    lost = torch.finfo(dtype).eps / 2 + (rank + 3) * torch.finfo(torch.float32).eps
    bound = x.abs().double() @ size.T * lost
    assert weights["a.weight"].dtype == dtype
    assert ((x.double() @ weights["a.weight"].double().T - expected).abs() <= bound).all()


def test_what_a_warm_start_has_made_of_an_adapter_is_version_0(tmp_path: Path, policy_copy: Path) -> None:
    policy = {"model": str(policy_copy), "dtype": "float32", "warmstart": {"steps": 2, "batch_size": 4}}
    run = begin(tmp_path, policy=policy, train={"lora": {"rank": 2, "alpha": 3}})
    warm = RunDirectory(run.warmstart_dir)
    warm.write_config(configure_warmstart(run.read_config(RunConfig), count_parameters(str(policy_copy))))
    config = warm.read_config(RunConfig)
    assert config.train.lora is not None and config.train.learning_rate == pytest.approx(5 * 3e-3)
    started(warm)
    adapter = read_adapter(warm.start_adapter_dir)
    taught = {name: torch.randn_like(t) for name, t in load_weights(warm.start_adapter_dir).items()}
    save_adapter(warm.weights_dir(config.train.iterations), taught, adapter.encode(""), 1, "bfloat16")
    data = start(RunRef(run.run_id, run.uri, dataplane_url="", attempt=1), warmed=True)
    assert data["adapter"]["rank"] == 2 and read_adapter(run.start_adapter_dir) == adapter
    copied = load_weights(run.version_dir(0))
    assert all(torch.equal(copied[name], t.bfloat16()) for name, t in taught.items())
    base = load_weights(str(policy_copy))
    assert all(torch.equal(t, base[name]) for name, t in load_weights(run.start_dir).items())
