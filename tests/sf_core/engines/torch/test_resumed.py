"""Requests that come back after an interruption: their prompts end with tokens that were sampled for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sf_core.engines.torch.cached_model import DecoderModel
from sf_core.engines.torch.kv_cache import KVCache
from sf_core.engines.torch.torch_engine import TorchEngine
from sf_core.testing.model_engines import ModelEngineTests
from sf_core.types import GenerationRequest, Sampling
from tests.bench.engines.model_folders import ModelFolders
from tests.bench.properties import examples
from tests.sf_core.engines.torch import asked

GROUP_SIZE = 8
SAMPLED = 5
TOLERANCE = ModelEngineTests.tolerance


class Filled:
    """Number of tokens whose KV was computed before a token was sampled."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_tokens = 0
        prefill = DecoderModel.prefill

        def count(
            model: DecoderModel, cache: KVCache, ids: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor
        ) -> None:
            self.num_tokens += ids.numel()
            prefill(model, cache, ids, starts, slots)

        patch.setattr(DecoderModel, "prefill", count)


def group_of(prompt: list[int], first_seed: int, max_tokens: int = 20) -> list[GenerationRequest]:
    """A group of requests with the same prompt."""
    return [
        GenerationRequest(f"{first_seed + i}", prompt, 0, max_tokens, (), Sampling(seed=first_seed + i), True)
        for i in range(GROUP_SIZE)
    ]


def interrupt(
    engine: TorchEngine, requests: list[GenerationRequest], num_steps: int
) -> list[GenerationRequest]:
    """The requests as they come back after these steps of the engine."""
    sampled: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    for _ in range(num_steps):
        for chunk in engine.step():
            sampled[chunk.request_id] += chunk.token_ids
    engine.abort()
    return [resume(request, sampled[request.request_id]) for request in requests]


def resume(request: GenerationRequest, sampled: list[int]) -> GenerationRequest:
    return GenerationRequest(
        request.request_id,
        [*request.prompt_ids, *sampled],
        len(sampled),
        request.max_tokens - len(sampled),
        (),
        request.sampling,
        stream=True,
    )


def differences(
    folder: str, engine: TorchEngine, requests: list[GenerationRequest], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Differences between the engine's log-probs and those of a pass over whole sequences."""
    by_id = {request.request_id: request for request in requests}
    done = asked.finish(engine, requests)
    assert done.keys() == by_id.keys()
    return torch.cat(
        [
            (torch.tensor(logprobs) - asked.full_logprobs(folder, by_id[name], tokens, dtype)).abs()
            for name, (tokens, logprobs) in done.items()
        ]
    )


def test_the_prompt_of_a_group_that_comes_back_under_new_weights_is_computed_once(
    model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = asked.prompts(40, 33)
    requests = [*group_of(first, 0), *group_of(second, 100)]
    engine = asked.engine_of(model_folders(), max_running=len(requests))
    again = interrupt(engine, requests, SAMPLED)
    assert {request.position for request in again} == {SAMPLED}
    asked.take(engine, model_folders("qwen3", 1), 1)
    filled = Filled(monkeypatch)
    for request in again:
        engine.submit(request)
    assert len(engine.step()) == len(requests)
    # the last token of a prompt, and of a sequence, is computed with those of the other pass
    in_prompts = max(len(first), len(second)) - 1
    assert filled.num_tokens <= 2 * in_prompts + len(requests) * SAMPLED


def test_a_group_that_comes_back_has_the_log_probs_of_a_full_pass(model_folders: ModelFolders) -> None:
    assert differences_of_a_group(model_folders, torch.float32).max() < TOLERANCE


def test_in_bfloat16_a_group_that_comes_back_is_as_exact_as_bfloat16_is(model_folders: ModelFolders) -> None:
    found = differences_of_a_group(model_folders, torch.bfloat16)
    assert found.mean() < 0.04
    assert found.max() < 0.4


def differences_of_a_group(model_folders: ModelFolders, dtype: torch.dtype) -> torch.Tensor:
    """Differences of a group that continues under other weights."""
    (prompt,) = asked.prompts(30)
    engine = asked.engine_of(model_folders(), max_running=12, dtype=dtype)
    requests = group_of(prompt, 0)
    again = interrupt(engine, requests, SAMPLED)
    asked.take(engine, model_folders("qwen3", 1), 1)
    return differences(model_folders("qwen3", 1), engine, again, dtype)


@settings(
    max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_any_part_of_a_prompt_may_have_been_sampled_before(
    model_folders: ModelFolders, kind: str, data: st.DataObject
) -> None:
    """All of it too, and prompts of one token, beside KV that earlier requests left behind."""
    folder = model_folders(kind)
    engine = asked.engine_of(folder, max_running=data.draw(st.integers(1, 6)), context_length=60)
    shared = asked.prompts(30)[0]
    for round_ in range(data.draw(st.integers(1, 2))):
        requests = []
        for i in range(data.draw(st.integers(1, 8))):
            prompt = shared[: data.draw(st.integers(0, 30))]
            sampled = data.draw(st.lists(st.integers(0, 59), min_size=not prompt, max_size=12))
            request = GenerationRequest(f"{round_}-{i}", prompt, 0, len(sampled) + 4, (), Sampling(seed=i))
            requests.append(resume(request, sampled))
        assert differences(folder, engine, requests).max() < TOLERANCE
