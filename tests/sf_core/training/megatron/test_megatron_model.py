from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sf_core.config import TrainConfig
from sf_core.training.megatron.limits import check_shape
from sf_core.training.torch.ranks import Ranks, SingleRank
from tests.bench import training
from tests.bench.training import model_contract, policies

CUT_LAYERS = {"tensor_parallel": 2}
CUT_PIPELINE = {"pipeline_parallel": 2}


@pytest.fixture(
    params=[lambda: policies.qwen(vocab_size=65), policies.qwen2, policies.llama],
    ids=["qwen", "qwen2", "llama"],
)
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A policy whose vocabulary two ranks cannot split evenly, one with biases, and one with neither."""
    return saved(request.param, tmp_path)


def saved(make: Any, tmp_path: Path) -> str:
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            # norms that are all one, and biases that are all zero, could be mistaken for each other
            parameter.data += torch.empty_like(parameter).uniform_(-0.1, 0.1)
    model.save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


class MegatronTests(model_contract.FullModelTests):
    backend = "sf_core.training.megatron.backend:MegatronBackend"

    def setup(self, folder: str, **train: Any) -> model_contract.Setup:
        workers = train.get("tensor_parallel", 1) * train.get("pipeline_parallel", 1)
        return super().setup(folder, backend="megatron", workers=workers, **train)


class TestContract(MegatronTests):
    layouts = ((1, {}), (2, CUT_LAYERS), (2, CUT_PIPELINE), (2, {}), (2, CUT_PIPELINE | {"recompute": True}))

    def test_it_goes_on_from_what_the_torch_backend_has_stored_and_the_other_way_round(
        self, policy: str
    ) -> None:
        batches = [
            training.batches.make_batch(
                training.batches.grouped_rows(4, 3), logprob=-4.0, group_size=3, seed=seed
            )
            for seed in range(3)
        ]
        train: dict[str, Any] = {"learning_rate": 1e-4}
        torch_setup = model_contract.Setup(
            "sf_core.training.torch.backend:TorchBackend", policy, {"train": train}
        )
        of_torch = str(self.tmp_path / "of-torch")
        wanted = self.on(2, partial(model_contract.train_on, torch_setup, batches, of_torch, 2))
        for number, (size, cut) in enumerate(self.layouts):
            setup = self.setup(policy, **train, **cut)
            of_megatron = str(self.tmp_path / f"of-megatron-{number}")
            straight = self.on(size, partial(model_contract.train_on, setup, batches, of_megatron, 2))
            for found, stored in (
                (self.on(size, partial(model_contract.train_on, setup, batches, of_torch, None)), wanted),
                (
                    self.on(1, partial(model_contract.train_on, torch_setup, batches, of_megatron, None)),
                    straight,
                ),
            ):
                for name, array in stored.items():
                    assert abs(found[name] - array).max() < 2e-5, (size, cut, name)


@pytest.mark.nightly
class TestContractOfFourRanks(MegatronTests):
    layouts = ((1, {}), (4, CUT_LAYERS | CUT_PIPELINE), (4, CUT_LAYERS), (4, CUT_PIPELINE))


def listening(folder: str, ranks: Ranks) -> tuple[set[str], int]:
    """The addresses on which this process listens while it has its part of a model, and how many ports."""
    from sf_core.training.megatron.megatron_model import MegatronModel  # takes seconds

    config = TrainConfig.model_validate({"backend": "megatron", "workers": 2} | CUT_LAYERS)
    # else it is gone, and nothing listens any more
    _model = MegatronModel(folder, ranks, config)
    found = [one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
    return {address.ip for address in found}, len(found)


def test_ranks_listen_on_the_address_of_their_worker_and_nowhere_else(tmp_path: Path) -> None:
    known = [one for addresses in psutil.net_if_addrs().values() for one in addresses]
    hosts = [one.address for one in known if one.family == socket.AF_INET and one.address[:4] != "127."]
    if not hosts:
        pytest.skip("this machine has no address but loopback")
    folder = saved(policies.llama, tmp_path)
    members = [training.gang.Member("t0"), training.gang.Member("t1")]
    one = training.gang.Try(str(tmp_path), ("t0", "t1"), host=hosts[0])
    for member in members:
        member.sit(one, partial(listening, folder))
    reports = [member.report() for member in members]
    for member in members:
        member.end()
    assert all(addresses == {hosts[0]} and ports > 1 for addresses, ports in reports), reports


def test_an_architecture_that_it_does_not_know_is_refused(tmp_path: Path) -> None:
    from sf_core.training.megatron.megatron_model import MegatronModel

    with pytest.raises(ValueError, match=r"the policy's model_type is gpt2: use train\.backend torch$"):
        MegatronModel(saved(policies.gpt2, tmp_path), SingleRank(), TrainConfig())


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"model_type": "mixtral"}, "trains llama, qwen2, qwen3, and the policy's model_type is mixtral: "),
        ({"attention_bias": True}, "does not support the policy's llama with attention_bias True: use"),
        (
            {"hidden_act": "gelu"},
            "does not support the policy's llama with hidden_act gelu: use train.backend",
        ),
        (
            {"num_key_value_heads": 2},
            "train.tensor_parallel (4) must divide the policy's num_key_value_heads",
        ),
        ({"intermediate_size": 30}, "(4) must divide the policy's intermediate_size, which is 30"),
        ({"num_hidden_layers": 7}, "train.pipeline_parallel (2) must divide the policy's num_hidden_layers"),
        ({}, None),
    ],
)
def test_a_policy_that_cannot_be_cut_so_is_refused(shape: dict[str, Any], sentence: str | None) -> None:
    known = {"model_type": "llama", "num_attention_heads": 8, "intermediate_size": 32, "num_hidden_layers": 8}
    settings = TrainConfig(tensor_parallel=4, pipeline_parallel=2)
    if sentence is None:
        check_shape(known, settings)
        return
    with pytest.raises(ValueError) as refused:
        check_shape(known | shape, settings)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)
