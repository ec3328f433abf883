"""What the KV of a running request is of after an update, on real weights: by another engine with the server
of the session's."""

from collections.abc import Iterator
from typing import Literal

import pytest

from sf_core.engines.protocol import Engine
from sf_core.engines.registry import make_engine
from sf_core.engines.vllm import vllm_engine
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake, drain, ids_of, sample_by_both
from sf_core.types import Chunk, GenerationRequest, Sampling
from tests.sf_core.engines.vllm import small_policies
from tests.sf_core.engines.vllm.running_server import RunningServer

pytestmark = pytest.mark.system

LONG = [5 + i % 40 for i in range(140)]
"""More than one of vLLM's blocks of KV."""


@pytest.fixture
def running(engine: Engine, tied: small_policies.Policies, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines that are made have the server of the session's engine, in place of one of their own."""
    driven = DrivenEngine(engine)
    awake(driven, tied.ref(0))
    driven.rest()
    place = RunningServer(socket=small_policies.own_socket())
    monkeypatch.setattr(vllm_engine, "EngineServer", lambda *_, **__: place)
    yield
    # for the tests that own the server: it has other weights than they gave it
    awake(driven, tied.ref(99))
    driven.rest()


def difference(policy: small_policies.Policies, prompt: list[int], chunks: list[Chunk]) -> float:
    """Largest difference of the log-probs to a full forward pass by the weights of the last chunk."""
    ids = [*prompt, *ids_of(chunks)]
    expected = policy.logits(chunks[-1].version, ids).log_softmax(-1)
    told = [pair for c in chunks for pair in zip(c.token_ids, c.logprobs, strict=True)]
    return max(
        abs(logprob - expected[len(prompt) + i - 1, token].item()) for i, (token, logprob) in enumerate(told)
    )


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_kv_of_a_running_request_is_kept_or_computed_anew_with_the_new_weights(
    untied: small_policies.Policies, kv_on_update: Literal["keep", "recompute"]
) -> None:
    engine = DrivenEngine(make_engine(small_policies.config(kv_on_update=kv_on_update), untied.folder(0)))
    request = GenerationRequest(
        "r", LONG, 0, small_policies.CONTEXT - len(LONG), (), Sampling(seed=1), stream=True
    )

    def update() -> list[Chunk]:
        awake(engine, untied.ref(0))
        engine.submit(request)
        chunks = engine.step()
        while not ids_of(chunks):
            chunks += engine.step()
        return chunks + awake(engine, untied.ref(1)) + drain(engine)

    chunks = sample_by_both(update)
    first = [chunk for chunk in chunks if chunk.version == 0]
    later = [chunk for chunk in chunks if chunk.version == 1]
    assert difference(untied, LONG, first) < 1e-4
    assert (difference(untied, LONG + ids_of(first), later) < 1e-4) == (kv_on_update == "recompute")
    engine.rest()
    engine.close()
