"""Policies that vLLM's CPU build can run, an engine of one server for the whole session, and a way to reach
its server by TCP."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sf_core.engines.protocol import Engine
from sf_core.engines.registry import make_engine
from tests.bench.engines.adapter_folders import AdapterFolders
from tests.sf_core.engines.vllm.small_policies import Bases, Policies, config


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers with images keep what every engine promises too: that is checked nightly."""
    for item in items:
        if item.path == Path(__file__).with_name("test_seeing.py"):
            assert isinstance(item, pytest.Function)
            if item.function.__qualname__.startswith(("EngineTests.", "FolderEngineTests.")):
                item.add_marker(pytest.mark.nightly)


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
