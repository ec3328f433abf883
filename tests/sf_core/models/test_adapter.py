import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from sf_core.models.adapter import (
    Adapter,
    load_merged,
    make_factors,
    name_factor,
    read_adapter,
    shape_factors,
    split_name,
)
from sf_core.models.decoder import causal_attention, decoder_spec, fuse
from sf_core.models.projections import PACKED, PLAIN, Projections
from storage.tensors.weights import load_weights, open_weights, save_adapter
from tests.bench import closeness, engines

ALL = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def make_drawn(adapter: Adapter, folder: str, seed: int) -> dict[str, torch.Tensor]:
    """Factors that do change the model."""
    factors = make_factors(shape_factors(adapter, engines.model_folders.linears_of(folder)), seed)
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=random) * 0.02 if "lora_B" in name else tensor
        for name, tensor in factors.items()
    }


def merge(
    weights: dict[str, torch.Tensor], factors: dict[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    merged = dict(weights)
    for layer, factor in map(split_name, factors):
        if factor == "lora_B":
            product = factors[name_factor(layer, "lora_B")] @ factors[name_factor(layer, "lora_A")]
            merged[f"{layer}.weight"] = weights[f"{layer}.weight"] + scale * product
    return merged


def compute_logprobs(
    params: dict[str, torch.Tensor],
    folder: str,
    projections: Projections,
    factors: dict[str, torch.Tensor] | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    spec = decoder_spec(AutoConfig.from_pretrained(folder), 64)
    assert spec is not None
    decoder = fuse(params, spec, projections)
    if factors is not None:
        named = {".".join(split_name(name)): tensor for name, tensor in factors.items()}
        decoder = decoder.with_factors(named, scale)
    ids = torch.arange(24) % 50
    positions = torch.arange(12).repeat(2)
    with torch.inference_mode():
        hidden = decoder.run(ids, positions, lambda _, q, k, v: causal_attention(q, k, v, 2))
        return decoder.head(hidden).log_softmax(-1)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["qwen3", "qwen2", "llama"]),
    targets=st.sets(st.sampled_from(ALL), min_size=1),
    rank=st.integers(1, 9),
    packed=st.booleans(),
    seed=st.integers(0, 9),
)
def test_factors_beside_the_weights_compute_what_merged_weights_do(
    model_folders: engines.model_folders.ModelFolders,
    kind: str,
    targets: set[str],
    rank: int,
    packed: bool,
    seed: int,
) -> None:
    folder = model_folders(kind)
    adapter = Adapter(rank, 2.0 * rank, tuple(sorted(targets)))
    factors = make_drawn(adapter, folder, seed)
    weights = load_weights(folder)
    projections = PACKED if packed else PLAIN
    beside = compute_logprobs(weights, folder, projections, factors, adapter.scale)
    merged = compute_logprobs(merge(weights, factors, adapter.scale), folder, projections)
    base = compute_logprobs(weights, folder, projections)
    closeness.assert_rounded(beside, merged, closeness.FORWARD)
    assert (beside - base).abs().max() > 1e-3


def test_first_factors_change_nothing_bit_for_bit(model_folders: engines.model_folders.ModelFolders) -> None:
    folder = model_folders("qwen3")
    factors = make_factors(shape_factors(Adapter(8, 64.0, ALL), engines.model_folders.linears_of(folder)), 0)
    weights = load_weights(folder)
    base = compute_logprobs(weights, folder, PLAIN)
    assert torch.equal(compute_logprobs(weights, folder, PLAIN, factors, 8.0), base)


def test_first_factors_follow_from_the_seed_alone(model_folders: engines.model_folders.ModelFolders) -> None:
    shapes = shape_factors(Adapter(4, 8.0, ALL), engines.model_folders.linears_of(model_folders("qwen3")))
    first = make_factors(shapes, 3)
    reordered = make_factors(dict(reversed(shapes.items())), 3)
    other = make_factors(shapes, 4)
    assert all(torch.equal(first[name], reordered[name]) for name in shapes)
    assert not torch.equal(first[min(shapes)], other[min(shapes)])
    for name, tensor in first.items():
        bound = 0.0 if "lora_B" in name else tensor.shape[1] ** -0.5
        assert tensor.abs().max() <= bound


def test_linear_layers_are_those_of_the_blocks(model_folders: engines.model_folders.ModelFolders) -> None:
    linears = engines.model_folders.linears_of(model_folders("llama"))
    header, _ = open_weights(model_folders("llama"))
    in_blocks = {
        name for name, entry in header.entries.items() if ".layers." in name and len(entry.shape) == 2
    }
    assert {f"{layer}.weight": tuple(shape) for layer, shape in linears.items()} == {
        name: header.entries[name].shape for name in in_blocks
    }


def test_peft_reads_what_is_written(
    model_folders: engines.model_folders.ModelFolders, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = model_folders("qwen3")
    adapter = Adapter(4, 6.0, ("o_proj", "q_proj"))
    factors = make_drawn(adapter, folder, 1)
    save_adapter(str(tmp_path), factors, adapter.encode("the start folder"), 7)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path))
    ids = torch.arange(12)[None] % 50
    with torch.inference_mode():
        expected = model(ids).logits.log_softmax(-1)[0]
    beside = compute_logprobs(load_weights(folder), folder, PLAIN, factors, adapter.scale)
    closeness.assert_rounded(beside[:12], expected, closeness.FORWARD)
    assert read_adapter(str(tmp_path)) == adapter


def test_what_peft_writes_is_read(model_folders: engines.model_folders.ModelFolders, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folders("qwen3"))
    get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "o_proj"])).save_pretrained(
        str(tmp_path)
    )
    adapter = read_adapter(str(tmp_path))
    assert adapter == Adapter(4, 6.0, ("o_proj", "q_proj"))
    shapes = shape_factors(adapter, engines.model_folders.linears_of(model_folders("qwen3")))
    assert {name: tensor.shape for name, tensor in load_weights(str(tmp_path)).items()} == shapes


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal", "pissa", "olora"])
def test_an_adapter_of_peft_is_refused_or_merged_as_peft_computes_it(
    model_folders: engines.model_folders.ModelFolders, tmp_path: Path, init: bool | str
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = model_folders("llama")
    settings = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=init)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), settings).eval()
    for name, factor in model.named_parameters():
        if "lora_B" in name:
            factor.data += 0.02 * torch.randn(factor.shape, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(str(tmp_path))
    ids = torch.arange(12)[None] % 50
    try:
        merged = load_merged(folder, str(tmp_path), "float32")
    except ValueError as refused:
        assert "init_lora_weights" in str(refused) and init in ("pissa", "olora")
        return
    plain = AutoModelForCausalLM.from_pretrained(folder)
    plain.load_state_dict(merged, strict=False)
    with torch.inference_mode():
        closeness.assert_rounded(plain(ids).logits, model(ids).logits, closeness.FORWARD)


@pytest.mark.parametrize(
    "change,sentence",
    [
        ({"use_dora": True}, "describes DoRA (use_dora), which SeamlessFlow cannot train"),
        (
            {"use_rslora": True},
            "describes rank-stabilised scaling (rsLoRA) (use_rslora), which SeamlessFlow cannot train; set "
            "use_rslora to false and lora_alpha to 16 for the same result",
        ),
        (
            {"modules_to_save": ["lm_head"]},
            "describes whole modules in addition to its factors (modules_to_save)",
        ),
        (
            {"lora_dropout": 0.05},
            "describes dropout (lora_dropout), which SeamlessFlow cannot train; set lora_dropout to 0",
        ),
        ({"alpha_pattern": {"q_proj": 8}}, "describes an alpha for each layer (alpha_pattern)"),
        ({"rank_pattern": {"q_proj": 8}}, "describes a rank for each layer (rank_pattern)"),
        ({"bias": "all"}, "says that biases are trained (bias: all)"),
        (
            {"alora_invocation_tokens": [1, 2]},
            "describes factors for the tokens after an invocation (aLoRA) (alora_invocation_tokens)",
        ),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "describes factors for weights that changed when the adapter was made (init_lora_weights: "
            "pissa_niter_4): convert the factors",
        ),
        ({"peft_type": "IA3"}, "describes an adapter of kind IA3; only LoRA is supported"),
        ({"target_modules": ".*_proj"}, "names its layers by the pattern '.*_proj'"),
        ({"r": None}, "lacks r, lora_alpha or target_modules"),
    ],
)
def test_adapters_of_other_kinds_are_refused(
    tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    said = json.loads(Adapter(4, 8.0, ("q_proj",)).encode("a model")) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(ValueError) as refused:
        read_adapter(str(tmp_path))
    assert sentence in str(refused.value)
    assert str(tmp_path / "adapter_config.json") in str(refused.value)


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_an_unreadable_description_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"adapter_config.json cannot be read"):
        read_adapter(str(tmp_path))


def test_a_target_that_no_layer_has_is_named_with_those_there_are(
    model_folders: engines.model_folders.ModelFolders,
) -> None:
    linears = engines.model_folders.linears_of(model_folders("qwen3"))
    with pytest.raises(ValueError) as refused:
        shape_factors(Adapter(4, 8.0, ("lm_head", "q_proj")), linears)
    assert str(refused.value) == (
        "the target lm_head is not a linear layer of the model's blocks; these layers are " + ", ".join(ALL)
    )


def test_a_name_that_is_no_factor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"base_model.model.lm_head.weight is not a factor"):
        split_name("base_model.model.lm_head.weight")
