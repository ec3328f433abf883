from __future__ import annotations

import inspect
from functools import partial
from typing import get_args

import pytest

from sf_core.config import RunConfig
from sf_core.config.train_config import TrainerName
from sf_core.scheduling.worker_state import WorkerState
from sf_core.training.backends import TRAINERS, TrainerBackend, check_installed, trainer_backend, trainer_kind


def config(kind: str, backend: str | None) -> RunConfig:
    engine = {"kind": kind, "script": "tests.bench.stacks.echo_package:script"}
    return RunConfig.model_validate({"engine": engine, "train": {"backend": backend}})


def test_the_backends_are_those_that_a_configuration_can_name() -> None:
    assert [*TRAINERS] == [*get_args(TrainerName)]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_backend_has_the_functions_of_the_protocol(name: str) -> None:
    backend = trainer_backend(config("emulated", name), WorkerState("t0"))
    for function in ("meet", "trainer_at", "rest", "close"):
        wanted = [*inspect.signature(getattr(TrainerBackend, function)).parameters][1:]
        assert [*inspect.signature(getattr(backend, function)).parameters] == wanted


def test_a_worker_keeps_its_backend_until_a_run_with_another_one_trains() -> None:
    worker = WorkerState("t0")
    first = trainer_backend(config("emulated", "emulated"), worker)
    assert trainer_backend(config("emulated", "emulated"), worker) is first
    assert trainer_backend(config("emulated", "torch"), worker) is worker.trainer is not first


@pytest.mark.parametrize(
    ("kind", "backend", "expected"),
    [
        ("torch", None, "torch"),
        ("scripted", None, "torch"),
        ("emulated", None, "emulated"),
        ("scripted", "emulated", "emulated"),
        ("emulated", "torch", "torch"),
        ("torch", "megatron", "megatron"),
    ],
)
def test_the_backend_is_the_setting_and_without_it_that_of_the_engine(
    kind: str, backend: str | None, expected: str
) -> None:
    assert trainer_kind(config(kind, backend)) is TRAINERS[expected]


def test_an_engine_that_needs_weights_gets_no_trainer_without() -> None:
    with pytest.raises(
        ValueError, match=r"^train\.backend emulated computes no weights, but engine\.kind torch"
    ):
        trainer_kind(config("torch", "emulated"))


def test_a_backend_whose_library_is_not_installed_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = config("torch", "megatron")
    check_installed(run)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_installed(config("torch", "torch"))
    for needs_it in (check_installed, partial(trainer_backend, worker=WorkerState("t0"))):
        with pytest.raises(FileNotFoundError) as refused:
            needs_it(run)
        assert str(refused.value) == (
            "train.backend megatron needs megatron-core, which this Python does not have: "
            "it comes with the extra [megatron] of seamlessflow"
        )


def test_emulation_needs_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config("emulated", None)
    check_installed(run)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="needs the package benchmarks, which only a clone"):
        check_installed(run)
