"""A server that somebody else started: that of the session's engine, at a port."""

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from sf_core.engines.driven import DrivenEngine
from sf_core.engines.protocol import Engine, EngineLostError
from sf_core.engines.registry import make_engine
from sf_core.engines.testing import awake, drain, ids_of, sample_by_both
from sf_core.types import Chunk, GenerationRequest, Sampling, WeightsRef
from storage.files import write_atomic
from tests.bench.engines.adapter_folders import AdapterFolders
from tests.sf_core.engines.vllm.conftest import CONTEXT, Policies, config, own_socket, refusal, servers

pytestmark = pytest.mark.system

LONG = [5 + i % 40 for i in range(140)]
"""More than one of vLLM's blocks of KV."""


@pytest.fixture
def adopted_url(engine: Engine, tied: Policies, as_tcp: Callable[[str], str]) -> Iterator[str]:
    driven = DrivenEngine(engine)
    awake(driven, tied.ref(0))
    driven.rest()
    yield as_tcp(own_socket())
    # for the tests that own the server: it has other weights than they gave it
    awake(driven, tied.ref(99))
    driven.rest()


def difference(policy: Policies, prompt: list[int], chunks: list[Chunk]) -> float:
    """Largest difference of the log-probs to a full forward pass by the weights of the last chunk."""
    ids = [*prompt, *ids_of(chunks)]
    expected = policy.logits(chunks[-1].version, ids).log_softmax(-1)
    told = [pair for c in chunks for pair in zip(c.token_ids, c.logprobs, strict=True)]
    return max(
        abs(logprob - expected[len(prompt) + i - 1, token].item()) for i, (token, logprob) in enumerate(told)
    )


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_an_adopted_server_takes_weights_and_keeps_or_recomputes_kv_and_is_not_ended(
    adopted_url: str, untied: Policies, kv_on_update: Literal["keep", "recompute"]
) -> None:
    before = servers()
    settings = config(vllm={"url": adopted_url}, kv_on_update=kv_on_update)
    engine = DrivenEngine(make_engine(settings, untied.folder(0)))
    request = GenerationRequest("r", LONG, 0, CONTEXT - len(LONG), (), Sampling(seed=1), stream=True)

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
    assert servers() == before


def test_a_server_that_cannot_be_an_engine_is_refused_in_one_sentence(
    adopted_url: str, untied: Policies, tied: Policies, adapters: AdapterFolders
) -> None:
    assert f"--max-model-len {CONTEXT + 1}" in refusal(adopted_url, untied, context_length=CONTEXT + 1)
    start = adapters.start("qwen3")
    weights = WeightsRef(1, adapters.version("qwen3", 1))
    said = refusal(adopted_url, start, weights, adapts=True)
    assert "takes no adapters: start it with --enable-lora --max-loras=2 --max-cpu-loras=3" in said
    # its own engine gives it a head that is not tied
    assert "tied to the embedding" in refusal(adopted_url, tied)
    write_atomic("memory://w/model.safetensors", Path(untied.folder(0), "model.safetensors").read_bytes())
    assert "storage.root" in refusal(adopted_url, untied, weights=WeightsRef(0, "memory://w"))


def test_a_server_without_the_routes_is_refused(untied: Policies) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert "VLLM_SERVER_DEV_MODE=1" in refusal(f"http://127.0.0.1:{server.server_port}", untied)
        server.shutdown()


def test_a_server_that_is_not_there_is_lost(untied: Policies) -> None:
    settings = config(vllm={"url": "http://127.0.0.1:9"})
    engine = DrivenEngine(make_engine(settings, untied.folder(0)))
    with pytest.raises(EngineLostError, match="/is_paused"):
        awake(engine, untied.ref(0))
    engine.close()
