"""vLLM's server with adapters: the contract, updates among many requests, one that is killed between two
versions, and many versions."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sf_core.engines.protocol import AsyncEngine, Engine, EngineLostError
from sf_core.engines.registry import make_engine
from sf_core.engines.vllm.client import VllmClient
from sf_core.engines.vllm.server import ENABLE_LORA
from sf_core.engines.vllm.weight_loading import LoraWeights
from sf_core.testing.engines import awake, drain, ids_of, until
from sf_core.types import Chunk, GenerationRequest, Sampling, WeightsRef
from tests.bench.engines.adapter_contract import AdapterEngineTests
from tests.bench.engines.adapter_folders import AdapterFolders
from tests.sf_core.engines.vllm import small_policies

# test_contract.py has what every server promises
pytestmark = pytest.mark.nightly

KIND = "qwen3"

MOST_GROWTH = 60e6
"""Most growth of a server's memory after its first versions, in bytes."""


@pytest.fixture(scope="module")
def adapting(vllm: str, adapters: AdapterFolders) -> Iterator[Engine]:
    """An engine whose server is started by the first test."""
    engine = make_engine(small_policies.config(adapts=True), adapters.start(KIND))
    yield engine
    engine.close()


class TestContract(AdapterEngineTests):
    num_tokens = 120
    """More than any engine samples in the few steps of a test that interrupts."""
    num_sequences = 5
    context_length = small_policies.CONTEXT
    kind = KIND

    @pytest.fixture(autouse=True)
    def _of(self, adapting: AsyncEngine, adapters: AdapterFolders) -> None:
        self.engine = adapting
        self.adapters = adapters
        # after a test that failed
        adapting.loop.run_until_complete(adapting.rest())

    def make(self) -> Engine:
        return self.engine

    def sampling(self, seed: int) -> Sampling:
        # what vLLM draws depends on interruptions (docs/decisions/026-vllm.md)
        return Sampling(temperature=0)

    def test_many_requests_at_once_go_on_over_updates_each_by_the_version_of_its_chunks(self) -> None:
        with self.serve() as engine:
            requests: list[GenerationRequest] = []
            chunks: list[Chunk] = []

            def submit(number: int) -> None:
                for i in range(len(requests), len(requests) + number):
                    sampling = Sampling(seed=i)
                    requests.append(
                        GenerationRequest(
                            f"{i}", [5 + i, 6], 0, small_policies.CONTEXT - 2, (), sampling, stream=True
                        )
                    )
                    engine.submit(requests[-1])

            def is_sampling() -> bool:
                """Whether the newest version has brought tokens."""
                return versions(chunks)[-1:] == [engine.version]

            submit(12)
            for version in (1, 5, 9):
                until(lambda: chunks.extend(engine.step()), is_sampling)
                chunks.extend(awake(engine, self.weights(version)))
                # under load the earlier ones may have ended
                submit(2)
            chunks.extend(drain(engine))
            assert versions(chunks) == [0, 1, 5, 9]
            for request in requests:
                own = [chunk for chunk in chunks if chunk.request_id == request.request_id]
                assert len(ids_of(own)) == small_policies.CONTEXT - 2
                self.check_logprobs(request, own)

    def test_a_server_that_is_killed_between_two_versions_serves_the_next_one_when_it_is_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unload_others = LoraWeights.unload_others
        killed = list[str]()

        async def kill_before(adapters: LoraWeights, client: VllmClient) -> None:
            if adapters.model and adapters.model.startswith("policy.1.") and not killed:
                killed.append(adapters.model)
                for process in small_policies.servers():
                    process.kill()
            await unload_others(adapters, client)

        with self.serve() as engine:
            # not earlier: a test before may have left version 1
            monkeypatch.setattr(LoraWeights, "unload_others", kill_before)
            engine.submit(self.request("r"))
            with pytest.raises(EngineLostError):
                awake(engine, self.weights(1))
                until(engine.step, lambda: False)
            assert killed
            # of its first requests none is sampled by the base
            engine.update_weights(self.weights(2))
            until(engine.step, lambda: engine.version == 2)
            self.check_effect(engine, 2)
            awake(engine, self.weights(3))
            self.check_effect(engine, 3)

    def test_sixty_versions_in_one_server_leave_its_memory_and_every_folder_that_it_knows(
        self, as_tcp: Callable[[str], str]
    ) -> None:
        memory = list[int]()
        with self.serve() as engine:
            url = as_tcp(small_policies.own_socket(ENABLE_LORA))
            for version in range(1, 61):
                engine.submit(self.request("r"))
                # of 30 adapters, each twice
                ref = WeightsRef(version, self.weights(1 + version % 30).uri)
                chunks = awake(engine, ref) + drain(engine)
                assert len(ids_of(chunks)) == self.num_tokens
                known = {card["id"]: card["root"] for card in list_models(url) if card["parent"]}
                assert any(name.startswith(f"policy.{version}.") for name in known) and len(known) <= 2
                assert all(Path(folder, "adapter_model.safetensors").exists() for folder in known.values())
                memory.append(sum(process.memory_info().rss for process in small_policies.servers()))
        assert max(memory[-10:]) - min(memory[5:15]) < MOST_GROWTH


def versions(chunks: list[Chunk]) -> list[int]:
    """Versions that sampled, each once, in their order."""
    return list(dict.fromkeys(chunk.version for chunk in chunks if chunk.token_ids))


def list_models(url: str) -> list[dict[str, str]]:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return list(json.load(answer)["data"])
