"""What is asked of vLLM and made of its answers, where no vLLM is needed to tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from sf_core.engines.protocol import EngineLostError, WeightsRefusedError
from sf_core.engines.vllm.server import EngineServer, make_adapter_arguments, make_arguments
from sf_core.engines.vllm.weight_loading import LoraWeights, PolicyFolder
from sf_core.models.adapter import Adapter, name_factor
from sf_core.testing.engines import awake, drain, until
from sf_core.types import Chunk, WeightsRef
from storage.tensors.weights import ADAPTER_NAME, save_adapter, save_weights
from tests.sf_core.engines.vllm import fake_server
from tests.sf_core.engines.vllm.serving_contract import ServingTests


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for version in range(60):
        save_weights(f"{root}/v-{version}", {"lm_head.weight": torch.full((2, 2), float(version))}, version)
    (root / "v-0" / "config.json").write_text(
        json.dumps({"vocab_size": fake_server.VOCABULARY}), encoding="utf-8"
    )
    return root


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    about = Adapter(2, 4, ("q_proj",)).encode("none")
    for folder in ("start/adapter", *(f"a-{version}" for version in range(60))):
        factor = torch.full((2, 2), float(folder.rpartition("-")[2]) if "-" in folder else 0.0)
        save_adapter(f"{root}/{folder}", {name_factor("q_proj", "lora_A"): factor}, about, 0)
    save_weights(f"{root}/start", {"q_proj.weight": torch.zeros(2, 2)}, 0)
    (root / "start" / "config.json").write_text(
        json.dumps({"vocab_size": fake_server.VOCABULARY}), encoding="utf-8"
    )
    return root


@pytest.fixture
def fake() -> Iterator[fake_server.FakeVllm]:
    with fake_server.fake_vllm() as fake:
        yield fake


class TestServing(ServingTests):
    def test_an_update_asks_for_what_is_left_with_kv_if_it_is_set_so(self) -> None:
        self.check_update(keep_kv=True)

    def test_a_refusal_while_the_weights_that_were_held_come_back_leaves_an_engine_that_serves(self) -> None:
        with self.serve() as engine:
            self.fake.reload_s = 0.2

            async def take(weights: WeightsRef) -> None:
                # not through the driver, which has no use for weights that it was told of
                self.engine.update_weights(weights)

            for weights in (self.weights(1), self.weights(0)):
                begun = self.fake.num_reloads + 1
                self.engine.loop.run_until_complete(take(weights))
                until(engine.step, lambda: self.fake.num_reloads >= begun)  # noqa: B023
            engine.update_weights(self.refused)
            with pytest.raises(WeightsRefusedError):
                until(engine.step, lambda: False)
            engine.submit(self.request("r"))
            self.check_tokens(drain(engine))


@given(rank=st.integers(1, 512))
def test_a_server_is_for_the_lowest_of_vllms_ranks_that_is_enough(rank: int) -> None:
    known = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    assert f"--max-lora-rank={min(k for k in known if k >= rank)}" in make_adapter_arguments(rank)


@pytest.mark.parametrize(
    ("on_cpu", "sleep_level", "ends"), [(False, 0, True), (True, 0, False), (False, 2, False)]
)
def test_a_server_ends_at_rest_if_it_holds_a_gpu_and_cannot_sleep(
    on_cpu: bool, sleep_level: int, ends: bool
) -> None:
    assert EngineServer("model", [], on_cpu=on_cpu, sleep_level=sleep_level).stops_at_rest == ends


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_server_with_adapters_never_sleeps_and_one_without_is_started_as_before(on_cpu: bool) -> None:
    def made(rank: int | None) -> list[str]:
        return make_arguments(
            dtype="float32",
            context_length=64,
            max_running=8,
            kv_bytes=1,
            on_cpu=on_cpu,
            adapter_rank=rank,
            more=["--x"],
        )

    without = made(None)
    assert not any("lora" in argument for argument in without)
    kept = [argument for argument in without if argument != "--enable-sleep-mode"]
    assert made(8) == [*kept[:-1], *make_adapter_arguments(8), "--x"]
    assert ("--enable-sleep-mode" in without) != on_cpu


def test_a_server_is_given_the_adapter_of_the_newest_version_and_none_before_it(adapters: Path) -> None:
    weight_loading = LoraWeights(f"{adapters}/start", PolicyFolder(f"{adapters}/start", untied=False))
    for version in (0, 1, 2, 1, 5):
        folder = weight_loading.fetch(WeightsRef(version, f"{adapters}/a-{version}"))
        [factor] = load_file(f"{folder}/{ADAPTER_NAME}").values()
        assert factor.unique().tolist() == [version]
    weight_loading.close()


class TestAdapters(ServingTests):
    num_sequences = 5
    adapts = True

    @pytest.fixture(autouse=True)
    def _of(self, fake: fake_server.FakeVllm, adapters: Path) -> Iterator[None]:
        self.fake = fake
        self.folders = adapters
        self.engine = self.made()
        yield
        self.engine.close()
        assert fake.most_adapters <= 2
        # the base samples nothing
        assert all("model" in body for body in fake.bodies)

    def weights(self, version: int) -> WeightsRef:
        return WeightsRef(version, f"{self.folders}/a-{version}")

    def test_a_request_names_the_version_that_samples_it_and_the_one_before_is_unloaded(self) -> None:
        with self.serve() as engine:
            engine.submit(self.request("r", stream=True))
            chunks = engine.step() + awake(engine, self.weights(1)) + drain(engine)
            self.check_tokens(chunks + awake(engine, self.weights(2)))
            assert {name.split(".")[1] for name in [body["model"] for body in self.fake.bodies]} <= {"0", "1"}
            until(engine.step, lambda: [*self.fake.adapters.values()] == [2])
            engine.rest()
            # an engine that comes back to the version that it had has nothing to load
            begun = self.fake.num_reloads
            awake(engine, self.weights(2))
            assert self.fake.num_reloads == begun

    def test_after_each_switch_the_adapter_of_the_newest_version_samples(self) -> None:
        with self.serve() as engine:
            for version in range(1, 6):
                awake(engine, self.weights(version))
                sent = len(self.fake.bodies)
                engine.submit(self.request(f"r{version}"))
                assert {chunk.version for chunk in drain(engine)} == {version}
                asked = {body["model"] for body in self.fake.bodies[sent:]}
                assert {name.split(".")[1] for name in asked} == {f"{version}"}
                assert {self.fake.adapters[name] for name in asked} == {version}

    def test_an_adapter_that_the_server_refuses_leaves_the_one_before(self) -> None:
        with self.serve() as engine:
            engine.submit(self.request("r"))
            self.fake.refuses_adapters = True
            chunks: list[Chunk] = []
            engine.update_weights(self.weights(1))
            with pytest.raises(WeightsRefusedError, match=r"vLLM refused the adapter in .*: no such"):
                until(lambda: chunks.extend(engine.step()), lambda: False)
            self.check_tokens(chunks + drain(engine))
            assert [*self.fake.adapters.values()] == [0]
            self.fake.refuses_adapters = False
            awake(engine, self.weights(1))

    def test_a_server_that_has_lost_its_adapters_is_lost_and_given_them_again(self) -> None:
        with self.serve() as engine:
            # somebody has started it again, between two looks at its health
            self.fake.adapters.clear()
            engine.submit(self.request("r"))
            with pytest.raises(EngineLostError, match="404"):
                drain(engine)
            awake(engine, self.weights(1))
            engine.submit(self.request("r"))
            self.check_tokens(drain(engine))

    def test_a_server_that_cannot_sleep_gives_its_gpu_back_by_its_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self.place, "stops_at_rest", True)
        # a server that is started again knows no adapters
        monkeypatch.setattr(self.place, "stop", self.fake.adapters.clear)
        with self.serve() as engine:
            awake(engine, self.weights(1))
            engine.rest()
            assert not self.fake.adapters
            awake(engine, self.weights(1))
            engine.submit(self.request("r"))
            self.check_tokens(drain(engine))
