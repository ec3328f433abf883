"""The built-in engine with an adapter: the contract, and what is its own."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sf_core.config import RunConfig
from sf_core.engines.protocol import Engine
from sf_core.engines.registry import make_engine
from sf_core.engines.torch.torch_engine import TorchEngine
from sf_core.models.adapter import Adapter, make_factors, shape_factors
from sf_core.testing.engines import ids_of, sample
from sf_core.types import Chunk
from storage import files
from storage.tensors.weights import save_adapter, save_weights
from tests import bench
from tests.bench import closeness
from tests.sf_core.engines.torch import asked

LEAN = "qwen3"
OTHER = "qwen3-moe"
"""Architectures that run by the lean decoder, and by transformers' own forward pass."""


@pytest.mark.parametrize("kind", [LEAN, pytest.param(OTHER, marks=pytest.mark.nightly)])
class TestContract(
    bench.engines.adapter_contract.AdapterEngineTests, bench.engines.grammar_contract.GrammarEngineTests
):
    num_sequences = bench.properties.examples(20)

    @pytest.fixture(autouse=True)
    def _of(self, adapter_folders: bench.engines.adapter_folders.AdapterFolders, kind: str) -> None:
        self.adapters = adapter_folders
        self.kind = kind

    def make(self) -> Engine:
        given = {"engine": {"max_running": 8, "context_length": 100}, "train": {"lora": {}}}
        return make_engine(RunConfig.model_validate(given), self.adapters.start(self.kind))


def engine_of(
    start: str,
    kv_on_update: Literal["recompute", "keep"] = "recompute",
    dtype: torch.dtype = torch.float32,
) -> TorchEngine:
    """An engine that holds the adapter of a start folder as version 0."""
    adapter = f"{start}/adapter"
    engine = TorchEngine(
        start, adapter, max_running=4, context_length=100, kv_on_update=kv_on_update, dtype=dtype
    )
    asked.take(engine, adapter, 0)
    return engine


def logprobs_of(chunks: list[Chunk]) -> torch.Tensor:
    return torch.tensor([logprob for chunk in chunks for logprob in chunk.logprobs])


@pytest.mark.parametrize("kind", [LEAN, OTHER])
def test_the_base_is_read_once_for_all_versions(
    adapter_folders: bench.engines.adapter_folders.AdapterFolders, tmp_path: Path, kind: str
) -> None:
    start = tmp_path / "start"
    shutil.copytree(adapter_folders.start(kind), start)
    engine = engine_of(str(start))
    r = asked.request("r", asked.prompts(9)[0])
    (start / "model.safetensors").unlink()
    for version in (1, 2, 3):
        asked.take(engine, adapter_folders.version(kind, version), version)
    expected = engine_of(adapter_folders.start(kind))
    asked.take(expected, adapter_folders.version(kind, 3), 3)
    assert sample(engine, r) == sample(expected, r)


@pytest.mark.parametrize("kind", [LEAN, OTHER])
def test_kept_kv_is_that_of_its_request_and_no_other_one_starts_from_it(
    adapter_folders: bench.engines.adapter_folders.AdapterFolders, kind: str
) -> None:
    (prompt,) = asked.prompts(20)

    def go_on(kv_on_update: Literal["recompute", "keep"]) -> tuple[list[Chunk], list[int]]:
        """A request over an update, and the tokens of one that comes after it."""
        engine = engine_of(adapter_folders.start(kind), kv_on_update)
        engine.submit(asked.request("before", prompt, 40))
        chunks = engine.step() + asked.take(engine, adapter_folders.version(kind, 2), 2)
        chunks += sample(engine, asked.request("after", prompt, 40))
        return [c for c in chunks if c.request_id == "before"], ids_of(chunks, "after")

    (kept, after_kept) = go_on("keep")
    (recomputed, after_recomputed) = go_on("recompute")
    assert [chunk.version for chunk in kept] == [chunk.version for chunk in recomputed] == [0, 2, 2, 2]
    assert ids_of(kept) != ids_of(recomputed)
    assert after_kept == after_recomputed


@pytest.mark.parametrize("kind", [LEAN, OTHER])
def test_in_bfloat16_the_rounded_factors_are_beside_the_rounded_weights(
    adapter_folders: bench.engines.adapter_folders.AdapterFolders, tmp_path: Path, kind: str
) -> None:
    start = adapter_folders.start(kind)
    adapter = adapter_folders.adapter(kind)
    weights = {
        name: tensor.bfloat16().float() for name, tensor in load_file(f"{start}/model.safetensors").items()
    }
    factors = {name: factor.bfloat16().float() for name, factor in adapter_folders.factors(kind, 3).items()}
    shutil.copytree(start, tmp_path, dirs_exist_ok=True)
    save_weights(str(tmp_path), bench.engines.adapter_folders.merge(weights, factors, adapter.scale), 0)
    exact = TorchEngine(str(tmp_path), max_running=4, context_length=100)
    asked.take(exact, str(tmp_path), 0)
    engine = engine_of(start, dtype=torch.bfloat16)

    def first_logprobs(engine: TorchEngine) -> torch.Tensor:
        """Log-probs of the likeliest token after each prompt."""
        requests = [asked.request(f"{i}", prompt, 1) for i, prompt in enumerate(asked.prompts(*range(3, 40)))]
        return torch.stack([logprobs_of(sample(engine, r)) for r in requests])

    of_base = first_logprobs(engine)
    asked.take(engine, adapter_folders.version(kind, 3), 3)
    told = first_logprobs(engine)
    expected = first_logprobs(exact)
    assert (told - expected).abs().mean() < 0.04
    assert (of_base - expected).abs().mean() > 0.2


def test_start_folder_and_versions_may_be_in_an_object_store(
    adapter_folders: bench.engines.adapter_folders.AdapterFolders,
) -> None:
    remote = f"memory://{uuid.uuid4().hex}/run"
    for name, folder in (
        ("start", adapter_folders.start(LEAN)),
        ("v00001", adapter_folders.version(LEAN, 1)),
    ):
        for path in Path(folder).rglob("*"):
            if path.is_file():
                files.write_atomic(f"{remote}/{name}/{path.relative_to(folder)}", path.read_bytes())
    local = engine_of(adapter_folders.start(LEAN))
    r = asked.request("r", asked.prompts(9)[0])
    engine = engine_of(f"{remote}/start")
    asked.take(local, adapter_folders.version(LEAN, 1), 1)
    asked.take(engine, f"{remote}/v00001", 1)
    assert sample(engine, r) == sample(local, r)


@settings(
    max_examples=bench.properties.examples(10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_an_adapter_of_any_layers_rank_and_alpha_is_what_the_merged_model_gives(
    model_folders: bench.engines.model_folders.ModelFolders,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    kind = data.draw(st.sampled_from([LEAN, "qwen2", "llama-yarn", OTHER]))
    linears = bench.engines.model_folders.linears_of(model_folders(kind))
    names = sorted({layer.rpartition(".")[2] for layer in linears})
    adapter = Adapter(
        data.draw(st.integers(1, 40)),
        data.draw(st.floats(0.5, 64)),
        tuple(data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True).map(sorted))),
    )
    factors = make_factors(shape_factors(adapter, linears), seed=1)
    for factor in factors.values():
        factor.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
    root = tmp_path_factory.mktemp("any")
    start, merged = (shutil.copytree(model_folders(kind), root / name) for name in ("start", "merged"))
    save_adapter(str(start / "adapter"), factors, adapter.encode("tiny"), 0)
    save_weights(
        str(merged),
        bench.engines.adapter_folders.merge(load_file(merged / "model.safetensors"), factors, adapter.scale),
        0,
    )
    exact = TorchEngine(str(merged), max_running=4, context_length=100)
    asked.take(exact, str(merged), 0)
    r = asked.request("r", asked.prompts(30)[0], 1)
    told = sample(engine_of(str(start)), r)
    expected = sample(exact, r)
    # the likeliest token; of two that are equally likely, either may be. Norms keep logits as small as 8
    closeness.assert_rounded(logprobs_of(told), logprobs_of(expected), 2 * closeness.FORWARD, scale=8.0)
