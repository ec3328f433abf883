"""What real models need of the engine, at small shapes: prompts that no step takes whole, bounded memory."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, Qwen3Config

from sf_core.engines.torch.torch_engine import TorchEngine
from sf_core.models.context import cache_bytes
from sf_core.types import GenerationRequest, Sampling
from tests import bench
from tests.bench import closeness
from tests.sf_core.engines.torch import asked

CONTEXT = 12_000


@pytest.fixture(scope="module")
def two_policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two policies of one shape."""
    size = bench.engines.model_folders.SIZE | {"max_position_embeddings": CONTEXT}
    config = Qwen3Config(**size, head_dim=16, tie_word_embeddings=False)
    paths = tmp_path_factory.mktemp("0"), tmp_path_factory.mktemp("1")
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(paths[0]), str(paths[1])


@pytest.fixture
def first_policy(two_policies: tuple[str, str]) -> str:
    return two_policies[0]


def engine_of(
    folder: str,
    max_running: int = 4,
    dtype: torch.dtype = torch.float32,
    kv_on_update: Literal["recompute", "keep"] = "recompute",
) -> TorchEngine:
    engine = TorchEngine(
        folder, max_running=max_running, context_length=CONTEXT, dtype=dtype, kv_on_update=kv_on_update
    )
    asked.take(engine, folder, 0)
    return engine


def request(name: str, num_tokens: int, max_tokens: int = 12, temperature: float = 1.0) -> GenerationRequest:
    generator = torch.Generator().manual_seed(num_tokens)
    prompt = torch.randint(0, 60, (num_tokens,), generator=generator).tolist()
    return GenerationRequest(name, prompt, 0, max_tokens, (), Sampling(temperature, seed=3), stream=True)


def test_running_requests_get_tokens_while_a_long_prompt_is_filled(first_policy: str) -> None:
    engine = engine_of(first_policy)
    short = request("short", 9, 30)
    long = request("long", 5000)
    other = request("other", 40)
    engine.submit(short)
    engine.step()
    engine.submit(long)
    engine.submit(other)
    first = [[chunk.request_id for chunk in engine.step()] for _ in range(4)]
    assert all("short" in names for names in first)
    # 5,000 tokens take three steps of 2,048; what came after them does not wait for more than that
    assert ["long" in names for names in first] == [False, False, True, True]
    assert "other" in first[2]


@pytest.mark.parametrize("lengths", [(5000,), (5000, 5000, 4100, 30), (2600, 2600)])
def test_prompts_that_are_filled_in_pieces_give_what_a_full_pass_gives(
    first_policy: str, lengths: tuple[int, ...]
) -> None:
    requests = [request(str(i), length) for i, length in enumerate(lengths)]
    for name, (tokens, logprobs) in asked.finish(engine_of(first_policy), requests).items():
        expected = asked.full_logprobs(first_policy, requests[int(name)], tokens, torch.float32)
        closeness.assert_rounded(logprobs, expected, closeness.FORWARD)


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_kv_of_earlier_weights_in_a_half_filled_prompt_reaches_no_other_request(
    two_policies: tuple[str, str], kv_on_update: Literal["recompute", "keep"]
) -> None:
    engine = engine_of(two_policies[0], kv_on_update=kv_on_update)
    half = request("half", 5000)
    engine.submit(half)
    assert engine.step() == []
    asked.take(engine, two_policies[1], 1)
    other = replace(half, request_id="other")
    expected = asked.finish(engine_of(two_policies[1]), [other])["other"][0]
    done = asked.finish(engine, [other])
    assert done["other"][0] == expected
    assert (done["half"][0] == expected) == (kv_on_update == "recompute")


def test_a_prompt_that_is_aborted_half_filled_is_gone_on_with(first_policy: str) -> None:
    engine = engine_of(first_policy)
    r = request("r", 5000)
    engine.submit(r)
    engine.step()
    (ended,) = engine.abort()
    assert ended.token_ids == []
    engine.submit(r)
    # 2,048 of 4,999 tokens were there
    assert [bool(engine.step()) for _ in range(2)] == [False, True]


def test_bfloat16_serves_the_rounded_weights(first_policy: str) -> None:
    requests = [request("a", 3000), request("b", 70)]
    for name, (tokens, logprobs) in asked.finish(
        engine_of(first_policy, dtype=torch.bfloat16), requests
    ).items():
        r = next(r for r in requests if r.request_id == name)
        expected = asked.full_logprobs(first_policy, r, tokens, torch.bfloat16)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=0.1, rtol=0)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_the_cache_takes_the_memory_that_was_foretold(
    first_policy: str, dtype: torch.dtype, name: str
) -> None:
    config = AutoModelForCausalLM.from_pretrained(first_policy).config.to_dict()
    with bench.memory.Memory() as memory:
        engine = engine_of(first_policy, 3, dtype)
    assert memory.held == cache_bytes(config, 3, CONTEXT, name)
    assert engine.version == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_beside_the_cache_grows_with_the_context_and_not_with_its_square(
    first_policy: str, dtype: torch.dtype
) -> None:
    def peak(num_tokens: int) -> int:
        engine = engine_of(first_policy, dtype=dtype)
        with bench.memory.Memory() as memory:
            asked.finish(engine, [request("long", num_tokens, 4), request("short", 30, 4)])
        return memory.peak

    peaks = [peak(num_tokens) for num_tokens in (2100, 4200, 8400)]
    assert peaks[2] - peaks[1] < 2.2 * (peaks[1] - peaks[0])
    # less than half of what the scores of one layer's four heads would take
    assert peaks[2] < 8400**2 * 4 * dtype.itemsize / 2
