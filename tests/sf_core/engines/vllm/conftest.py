"""Policies that vLLM's CPU build can run, an engine of one server for the whole session, and a way to reach
its server by TCP."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from sf_core.config import RunConfig
from sf_core.engines.protocol import Engine
from sf_core.engines.registry import make_engine
from sf_core.types import WeightsRef
from tests.bench.engines.adapter_folders import AdapterFolders
from tests.bench.engines.model_folders import SIZE, ModelFolders, write_tokenizer

CONTEXT = 320


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers with pictures keep what every engine promises too: that is checked nightly."""
    for item in items:
        if item.path == Path(__file__).with_name("test_seeing.py"):
            assert isinstance(item, pytest.Function)
            if item.function.__qualname__.startswith(("EngineTests.", "FolderEngineTests.")):
                item.add_marker(pytest.mark.nightly)


class Policies:
    """Weights by version; the folder of version 0 is the start folder."""

    def __init__(self, root: Path, *, tied: bool) -> None:
        self._root = root
        self._tied = tied

    def folder(self, version: int) -> str:
        folder = self._root / f"{'tied' if self._tied else 'untied'}-{version}"
        if not folder.exists():
            torch.manual_seed(version)
            size = SIZE | {"max_position_embeddings": CONTEXT}
            shape = Qwen3Config(**size, head_dim=32, tie_word_embeddings=self._tied)
            AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
            write_tokenizer(folder)
        return str(folder)

    def ref(self, version: int) -> WeightsRef:
        return WeightsRef(version, self.folder(version))

    def logits(self, version: int, ids: list[int]) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(self.folder(version), dtype=torch.float32)
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]


class Bases(ModelFolders):
    """The start folders of policies, for which there are adapters."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies

    def __call__(self, kind: str = "", seed: int = 0) -> str:
        return self._policies.folder(seed)


def config(*, adapts: bool = False, **engine: object) -> RunConfig:
    settings = {"kind": "vllm", "context_length": CONTEXT, "max_running": 64}
    return RunConfig.model_validate({"engine": settings | engine, "train": {"lora": {} if adapts else None}})


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies(tmp_path_factory.mktemp("policies"), tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies(tmp_path_factory.mktemp("policies"), tied=False)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, tied: Policies) -> AdapterFolders:
    """Adapters of the tied policy, whatever their kind is called."""
    return AdapterFolders(tmp_path_factory.mktemp("adapters"), Bases(tied))


@pytest.fixture(scope="session")
def vllm(vllm: str) -> Iterator[str]:
    """Has every server compute with one thread: with more they wait for each other on all cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield vllm


@pytest.fixture(scope="session")
def engine(vllm: str, tied: Policies) -> Iterator[Engine]:
    """Its server is started by the first test."""
    engine = make_engine(config(), tied.folder(0))
    yield engine
    engine.close()


def servers() -> set[psutil.Process]:
    """The processes of vLLM that this process has started."""
    return {
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
        and any(word in " ".join(process.cmdline()) for word in ("vllm", "VLLM"))
    }


def own_socket(*words: str) -> str:
    """That of the one server of an engine here whose command has all of these words."""
    commands = [process.cmdline() for process in servers()]
    (socket,) = {
        command[command.index("--uds") + 1] for command in commands if {"--uds", *words} <= {*command}
    }
    return socket


@pytest.fixture
def as_tcp() -> Iterator[Callable[[str], str]]:
    """A function (path of a Unix socket) -> URL at which it can be reached, until the test ends."""
    with ExitStack() as listening:

        def forward(path: str) -> str:
            listener = listening.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=_accept, args=(listener, path), daemon=True).start()
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield forward


def _accept(listener: socket.socket, path: str) -> None:
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_carry, args=(near, path), daemon=True).start()


def _carry(near: socket.socket, path: str) -> None:
    with near, socket.socket(socket.AF_UNIX) as far:
        far.connect(path)
        while True:
            for source in select.select([near, far], [], [])[0]:
                data = source.recv(65536)
                if not data:
                    return
                (far if source is near else near).sendall(data)
