"""What policies take of memory and storage, and what is refused because it cannot fit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from sf_core.config import PolicyConfig, RunConfig
from sf_core.models.builtin import make_policy
from sf_core.scheduling.plan import Worker
from sf_core.stages.preflight.checks import memory_fault
from sf_core.stages.preflight.facts import Facts
from sf_core.stages.preflight.sizes import PolicySizes, explain_sizes
from sf_core.stages.start import start_adapter
from sf_core.training.packing.rows import SAMPLING, Row
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.policy_folder import count_parameters, count_vision_tower
from sf_core.training.torch.network import Network
from storage.files import folder_bytes
from storage.scratch import scratch_folder
from storage.tensors.weights import open_weights
from tests.bench import refusals
from tests.bench.training import images

ENGINE = {"max_running": 64, "context_length": 100}
CACHE = 2 * 64 * 1 * 100 * 32 * 4
"""Keys and values of one layer with one head of 32, in float32."""
ROLLOUT = frozenset({"rollout"})
TRAIN = frozenset({"train"})


def check(config: RunConfig, workers: list[Worker]) -> None:
    facts = Facts(config)
    facts.workers = workers
    if fault := memory_fault(config, facts):
        raise ValueError(fault)


def explained(config: RunConfig) -> dict[str, str]:
    return explain_sizes(config, PolicySizes.of(config))


def configured(policy: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"policy": policy, "engine": ENGINE} | sections)


def test_sizes_are_those_of_the_parameters_in_the_folder(small_policy: str) -> None:
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(small_policy).parameters())
    sizes = PolicySizes.of(configured({"model": small_policy, "dtype": "float32"}, train={"workers": 3}))
    assert sizes is not None and (sizes.weights, sizes.cache) == (4 * parameters, CACHE)
    assert (sizes.rank, sizes.checkpoint) == (-(-16 * parameters // 3), 12 * parameters)
    halves = PolicySizes.of(configured({"model": small_policy, "dtype": "bfloat16"}))
    assert halves is not None and (halves.weights, halves.cache) == (2 * parameters, CACHE // 2)


@pytest.mark.parametrize(("dtype", "each"), [("float32", 18.5), ("bfloat16", 18)])
def test_one_rank_holds_its_weights_ready_for_a_step_and_several_do_not(
    small_policy: str, dtype: str, each: float
) -> None:
    parameters = count_parameters(small_policy)
    alone, shared = (
        PolicySizes.of(configured({"model": small_policy, "dtype": dtype}, train={"workers": workers}))
        for workers in (1, 2)
    )
    assert alone is not None and shared is not None
    assert (alone.rank, shared.rank) == (int(each * parameters), 8 * parameters)
    assert (shared.head, shared.largest) == (0, 0)


@pytest.mark.parametrize(("gigabytes", "fits"), [(70, False), (80, True)])
def test_a_step_of_qwen3_4b_with_recompute_barely_fits_on_a_card_of_80_gb(
    large: RunConfig, gigabytes: int, fits: bool
) -> None:
    config = large.model_copy(update={"train": large.train.model_copy(update={"recompute": True})})
    sizes = PolicySizes.of(config)
    assert sizes is not None and sizes.rank == 18 * QWEN3_4B_PARAMETERS
    assert 76e9 < sizes.peak() < 80e9
    card = [Worker("t0", TRAIN, memory=gigabytes * 1_000_000_000)]
    if fits:
        check(config, card)
    else:
        with pytest.raises(ValueError, match=r"needs 72\.4 GB for weights, gradient and Adam's moments"):
            check(config, card)


def test_the_tower_of_a_multimodal_policy_is_held_by_each_rank_and_not_trained(tmp_path: Path) -> None:
    folder = images.multimodal_policy(str(tmp_path))
    model = images.loaded(folder)
    tower = sum(p.numel() for p in model.model.visual.parameters())
    language = sum(p.numel() for p in model.parameters()) - tower
    assert (count_parameters(folder), count_vision_tower(folder)) == (language, tower)
    rollout = {"groups_per_batch": 2, "group_size": 2}
    config = configured({"model": folder, "dtype": "bfloat16"}, train={"workers": 2}, rollout=rollout)
    sizes = PolicySizes.of(config)
    assert sizes is not None and (sizes.weights, sizes.version) == (2 * (language + tower), 2 * language)
    assert (sizes.rank, sizes.checkpoint) == (8 * language + 2 * tower, 12 * language)
    assert sizes.cache == 2 * 64 * 2 * 100 * 1 * 32 * 2 * 2 // 2 and sizes.activations > 0
    assert sizes.features == 4 * 100 * 64 * 2
    said = explained(config)["memory"]
    assert f"with {2 * tower / 1e3:,.0f} kB of the vision tower" in said
    assert said.endswith(", and at most 51 kB for features of images")


@pytest.fixture(scope="module")
def deep_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a policy whose blocks keep much more than its head, which tests only read."""
    folder = str(tmp_path_factory.mktemp("deep"))
    make_policy(folder, PolicyConfig(hidden_size=128, num_layers=6), seed=0)
    return folder


@cache
def kept_bytes(model: str, rows: int, dtype: str, shared: int = 0) -> int:
    """Bytes that a forward pass over so many rows keeps for the backward pass, without the parameters. All
    rows begin with the same `shared` tokens, and then each has 100 tokens of its own."""
    network = Network(model)
    network.model.to(getattr(torch, dtype))
    length = shared + 100
    sampling = np.full(length, np.array((1.0, 1.0, 0), SAMPLING))
    nothing = np.zeros(length, np.float32)
    random = np.random.default_rng(0)
    ids = random.integers(5, 90, (rows, length)).astype(np.int32)
    ids[:, :shared] = random.integers(5, 90, shared)
    versions = np.zeros(length, np.int32)
    is_trained = np.arange(length) >= shared + 50
    [microbatch] = pack(
        [Row(own, is_trained, nothing, nothing, versions, sampling, nothing + 1, "g", "s") for own in ids],
        Packing(shared + 100 * rows),
    )
    parameters = {parameter.untyped_storage().data_ptr() for parameter in network.model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scored = network.scores(microbatch)
    assert scored[0].requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_with_a_long_prompt_keep_no_more_than_others_of_as_many_distinct_tokens(
    deep_policy: str, dtype: str
) -> None:
    sharing = kept_bytes(deep_policy, 8, dtype, shared=1200)
    assert sharing == pytest.approx(kept_bytes(deep_policy, 20, dtype), rel=0.25)


@pytest.mark.parametrize(
    ("given", "context", "told"), [(None, 16384, True), (None, 4096, False), (8192, 16384, False)]
)
def test_what_the_longest_rows_may_take_is_told_where_passes_grow_with_them(
    small_policy: str, given: int | None, context: int, told: bool
) -> None:
    config = RunConfig.model_validate(
        {
            "policy": {"model": small_policy, "dtype": "float32"},
            "engine": {"context_length": context},
            "train": {"tokens_per_microbatch": given},
        }
    )
    sizes = PolicySizes.of(config)
    assert sizes is not None
    four_times = f"but up to {4 * sizes.activations / 1e6:,.0f} MB of activations if rows are as long as"
    assert (four_times in explained(config)["memory"]) == told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_about_what_a_forward_pass_keeps(deep_policy: str, dtype: str) -> None:
    policy = {"model": deep_policy, "dtype": dtype}
    train = {"tokens_per_microbatch": 2000}
    sizes = PolicySizes.of(configured(policy, train=train))
    assert sizes is not None
    assert sizes.activations == pytest.approx(kept_bytes(deep_policy, 20, dtype), rel=0.3)
    again = PolicySizes.of(configured(policy, train=train | {"recompute": True}))
    assert again is not None and again.activations < sizes.activations / 3


@pytest.mark.parametrize(("dtype", "whole", "shared"), [("float32", 8, 8), ("bfloat16", 6, 12)])
def test_ranks_of_megatron_share_the_weights_only_with_those_that_cut_them(
    small_policy: str, dtype: str, whole: int, shared: int
) -> None:
    train = {"backend": "megatron", "workers": 4, "tensor_parallel": 2}
    sizes = PolicySizes.of(configured({"model": small_policy, "dtype": dtype}, train=train))
    alone = PolicySizes.of(configured({"model": small_policy, "dtype": "float32"}))
    assert sizes is not None and alone is not None
    parameters = alone.weights // 4
    assert sizes.rank == parameters * whole // 2 + parameters * shared // 4


def test_the_built_in_policy_is_as_large_as_its_settings_make_it(tmp_path: Path) -> None:
    make_policy(str(tmp_path), PolicyConfig(hidden_size=256, num_layers=6), seed=0)
    built_in = PolicySizes.of(configured({"hidden_size": 256, "num_layers": 6}))
    exact = PolicySizes.of(configured({"model": str(tmp_path), "dtype": "float32"}))
    assert built_in is not None and exact is not None and built_in.cache == exact.cache
    assert built_in.weights == pytest.approx(exact.weights, rel=0.02)


def test_engines_and_ranks_that_a_worker_has_no_memory_for_are_refused(small_policy: str) -> None:
    config = configured({"model": small_policy})
    sizes = PolicySizes.of(config)
    assert sizes is not None
    needed = sizes.weights + sizes.cache
    check(config, [Worker("r0", ROLLOUT, memory=needed), Worker("r1", ROLLOUT)])
    enough = sizes.peak()
    check(config, [Worker("t0", TRAIN, memory=enough), Worker("a0", frozenset({"agent"}), memory=1)])
    with refusals.clear_refusal(
        "64 requests (engine.max_running)", "100 tokens (engine.context_length)", "worker r1"
    ):
        check(config, [Worker("r0", ROLLOUT), Worker("r1", ROLLOUT, memory=needed - 1)])
    with refusals.clear_refusal("worker t0", "each of 1 ranks", "raise train.workers"):
        check(config, [Worker("t0", TRAIN, memory=sizes.rank - 1)])
    shared = configured({"model": small_policy}, train={"workers": 2})
    check(shared, [Worker("t0", TRAIN, memory=enough - sizes.rank // 2)])


QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "tie_word_embeddings": True,
}
QWEN3_4B_PARAMETERS = 4_020_000_000


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A policy of the shape of Qwen3-4B; its files would take 8 GB."""
    monkeypatch.setattr(
        "sf_core.stages.preflight.sizes.folder_to_start_from", lambda config, by_a_worker: "/large"
    )
    monkeypatch.setattr("sf_core.stages.preflight.sizes.count_parameters", lambda folder: QWEN3_4B_PARAMETERS)
    monkeypatch.setattr("sf_core.stages.preflight.sizes.read_model_config", lambda folder: QWEN3_4B)
    return configured({"model": "/large", "dtype": "bfloat16"}, rollout={"groups_per_batch": 32})


def test_activations_that_a_card_has_no_room_for_are_refused(large: RunConfig) -> None:
    card = [Worker("t0", TRAIN, memory=85_000_000_000)]
    with refusals.clear_refusal("set train.recompute to true", "train.tokens_per_microbatch (8192)"):
        check(large, card)
    again = large.model_copy(update={"train": large.train.model_copy(update={"recompute": True})})
    check(again, card)
    # fewer tokens than a micro-batch may have are never more than a batch has
    few = large.model_copy(update={"rollout": large.rollout.model_copy(update={"groups_per_batch": 1})})
    check(few, card)
    with refusals.clear_refusal("with train.recompute true: lower train.tokens_per_microbatch"):
        check(again, [Worker("t0", TRAIN, memory=73_000_000_000)])


def test_checkpoints_of_a_large_policy_are_rare_unless_settings_say_otherwise(large: RunConfig) -> None:
    assert "a checkpoint, every 10 iterations, 48.2 GB" in explained(large)["storage"]
    often = large.model_copy(update={"train": large.train.model_copy(update={"checkpoint_every": 1})})
    assert "a checkpoint, each iteration, 48.2 GB" in explained(often)["storage"]
    # the start folder, the exported policy, versions 10, 20, 30, 38, 39 and 40, and two checkpoints
    total = 8 * 2 * QWEN3_4B_PARAMETERS + 2 * 12 * QWEN3_4B_PARAMETERS
    assert explained(large)["disk"].startswith(f"about {total / 1e9:.1f} GB of weights and checkpoints")


def test_what_is_written_and_kept_is_said(small_policy: str) -> None:
    train = {"checkpoint_every": 5, "keep_checkpoints": 3, "keep_every": 20}
    said = explained(configured({"model": small_policy}, train=train))
    assert "every 5 iterations" in said["storage"] and "newest 3 stay" in said["storage"]
    assert said["storage"].endswith("and those of every 20 iterations")
    assert "of KV cache; the trainer: " in said["memory"]
    assert explained(configured({}, engine={"kind": "emulated"})) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_an_adapter_only_the_factors_are_trained_and_stored(small_policy: str, dtype: str) -> None:
    parameters = count_parameters(small_policy)
    width = {"float32": 4, "bfloat16": 2}[dtype]
    lora = {"lora": {"rank": 3, "targets": ["q_proj", "down_proj"]}, "workers": 2}
    sizes = PolicySizes.of(configured({"model": small_policy, "dtype": dtype}, train=lora))
    factors = 3 * (32 + 32) + 3 * (4 * 32 + 32)
    assert sizes is not None and sizes.adapter is not None and sizes.adapter.parameters == factors
    assert (sizes.version, sizes.weights) == (width * factors, width * (parameters + factors))
    assert sizes.checkpoint == 12 * factors
    assert sizes.rank == -(-16 * factors // 2) + -(-width * parameters // 2)


@settings(max_examples=10)
@given(rank=st.integers(1, 40), targets=st.sets(st.sampled_from(["q_proj", "v_proj", "up_proj"]), min_size=1))
def test_an_adapter_takes_as_much_as_its_file(small_policy: str, rank: int, targets: set[str]) -> None:
    lora = {"lora": {"rank": rank, "targets": sorted(targets)}}
    config = configured({"model": small_policy, "dtype": "float32"}, train=lora)
    sizes = PolicySizes.of(config)
    assert sizes is not None and sizes.adapter is not None
    with scratch_folder() as folder:
        start_adapter(folder, config, sizes.adapter)
        assert open_weights(folder)[0].data_bytes == sizes.version
        # names and shapes come on top
        assert sizes.version < folder_bytes(folder) < sizes.version + 4096


def test_the_words_name_what_stays_and_what_is_trained(small_policy: str) -> None:
    train = {"lora": {"rank": 1, "targets": ["q_proj"]}}
    told = explained(configured({"model": small_policy, "dtype": "float32"}, train=train))
    assert told["adapter"] == "64 parameters are trained, factors of rank 1 (alpha 2) of q_proj; made anew"
    assert "of the policy's weights, and the factors, their gradient and Adam's moments" in told["memory"]
    assert "of an adapter, which all stay; a checkpoint, each iteration" in told["storage"]
    config = configured({"model": small_policy, "dtype": "float32"}, train=train)
    with scratch_folder() as folder:
        start_adapter(folder, config, PolicySizes.of(config).adapter)  # type: ignore[union-attr, arg-type]
        tuned = explained(configured({"model": small_policy, "adapter": folder}, train=train))
    assert tuned["adapter"].endswith(f"of q_proj; as {folder} has it, made for {small_policy}")
    tight = [Worker("t0", TRAIN, memory=1)]
    with pytest.raises(ValueError) as refused:
        check(configured({"model": small_policy}, train=train), tight)
    held = "for the policy's weights, and the factors, their gradient and Adam's moments: raise train.workers"
    refusals.check_sentence(str(refused.value), held)
