"""Fixtures that several folders of tests use, each named after what it gives. pytest loads this file at every
start, so that what takes long to import is imported where it is used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from storage.run_directory import RunDirectory
from tests.bench.proxies import SilentProxy, silent_proxy
from tests.bench.s3_server import BUCKET, make_bucket, s3_server
from tests.bench.waits import join, patience

ROOT = Path(__file__).parents[2]

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from examples.repositories.libraries import Library
    from sf_core.dataplane.chat.renderer import Renderer
    from sf_core.environments.repositories.environment import Repositories
    from tests.bench.canned_model import CannedModel
    from tests.bench.dataplane.planes import ServedPlane
    from tests.bench.dataplane.restarts import Restarts
    from tests.bench.dataplane.run_driver import Driver
    from tests.bench.engines.adapter_folders import AdapterFolders
    from tests.bench.engines.model_folders import ModelFolders
    from tests.bench.training.gang import Member
    from tests.bench.workers import WorkerBench


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of async tests and fixtures."""
    return "asyncio"


# --- models


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a byte-level BPE tokenizer with merges and a ChatML template with tools, without weights."""
    from tests.bench.dataplane.tokenizers import make_model_dir

    folder = tmp_path_factory.mktemp("model")
    make_model_dir(folder)
    return str(folder)


@pytest.fixture(scope="session")
def renderer(model_dir: str) -> Renderer:
    """The renderer of `model_dir`."""
    from sf_core.dataplane.chat.renderer import Renderer

    return Renderer(model_dir)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    """Makes folders of tiny models with random weights, by architecture and seed."""
    from tests.bench.engines.model_folders import ModelFolders

    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def adapter_folders(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> AdapterFolders:
    """Makes folders of adapters of these models, by architecture and version."""
    from tests.bench.engines.adapter_folders import AdapterFolders

    return AdapterFolders(tmp_path_factory.mktemp("adapters"), model_folders)


def _make_policy(folder: Path, num_layers: int, *, sees: bool = False) -> str:
    from sf_core.config import PolicyConfig
    from sf_core.models.builtin import make_policy

    make_policy(str(folder), PolicyConfig(hidden_size=32, num_layers=num_layers, sees=sees), seed=0)
    return str(folder)


@pytest.fixture(scope="session")
def small_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a built-in policy of one layer, which tests only read."""
    return _make_policy(tmp_path_factory.mktemp("policy"), 1)


@pytest.fixture
def policy_copy(small_policy: str, tmp_path: Path) -> Path:
    """A copy of `small_policy`, which a test may change."""
    return Path(shutil.copytree(small_policy, tmp_path / "model"))


@pytest.fixture(scope="session")
def two_layer_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a built-in policy of two layers, which tests only read."""
    return _make_policy(tmp_path_factory.mktemp("policy"), 2)


@pytest.fixture(scope="session")
def small_multimodal_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a built-in policy of one layer that sees images, which tests only read."""
    return _make_policy(tmp_path_factory.mktemp("sees"), 1, sees=True)


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Has torch compute with one thread, until the session ends."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def canned_model() -> Iterator[CannedModel]:
    """An OpenAI-compatible server that gives prepared answers."""
    from tests.bench.canned_model import CannedModel

    model = CannedModel()
    threading.Thread(target=model.server.serve_forever, args=(0.01,), daemon=True).start()
    yield model
    model.server.shutdown()
    model.server.server_close()


# --- data planes


@pytest.fixture
def served_plane(tmp_path: Path, model_dir: str) -> Iterator[ServedPlane]:
    """A data plane in a thread, without a run."""
    from tests.bench.dataplane.planes import attended, running_app

    with running_app(grace_s=0.1) as url, attended(url, tmp_path, model_dir) as plane:
        yield plane


@pytest.fixture
def answering_plane(served_plane: ServedPlane, renderer: Renderer) -> ServedPlane:
    """A data plane with a run, whose engine answers every prompt by a number."""
    from tests.bench.dataplane.planes import say

    served_plane.register()
    served_plane.connect(lambda prompt, seed: say(renderer, f"answer {seed % 1000}"))
    return served_plane


@pytest.fixture
def plane_process(tmp_path: Path, model_dir: str) -> Iterator[ServedPlane]:
    """A data plane with the account's key, in a process of its own, without a run."""
    from tests.bench.dataplane.planes import attended, running_process

    with running_process(tmp_path / "port", 0) as url, attended(url, tmp_path, model_dir) as plane:
        yield plane


@pytest.fixture
def restarts(tmp_path: Path, model_dir: str) -> Iterator[Restarts]:
    """A data plane in a process of its own, which the test kills and starts again."""
    import httpx

    from tests.bench.dataplane.restarts import Restarts

    restarts = Restarts(tmp_path, model_dir)
    restarts.start()
    yield restarts
    with contextlib.suppress(httpx.HTTPError):
        restarts.plane.http.post("/runs/run/release")
    for thread in restarts.plane.threads:
        join(thread)
    restarts.kill()
    restarts.plane.http.close()


@pytest.fixture
async def driver(tmp_path: Path, model_dir: str, renderer: Renderer) -> AsyncIterator[Driver]:
    """All who work on one run, which the test registers. In the end a restart has to find it as it is."""
    from tests.bench.dataplane.run_driver import driving

    async with driving(model_dir, renderer, tmp_path) as driver:
        yield driver


# --- runs


@pytest.fixture
def empty_run(tmp_path: Path) -> RunDirectory:
    """The directory of a run, before anything is written."""
    return RunDirectory(str(tmp_path / "run-1"))


@pytest.fixture(params=["file", "memory"])
def runs_root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where run directories may lie: once on disk, once in fsspec's memory."""
    return str(tmp_path) if request.param == "file" else f"memory://{tmp_path}"


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run at version 3 with a checkpoint of version 2; tests that change it do so in a copy."""
    from tests.bench.trained_runs import BATCHES, SETTINGS, train_run

    return train_run(tmp_path_factory.mktemp("runs"), SETTINGS, BATCHES)


# --- processes


@pytest.fixture
def make_members() -> Iterator[Callable[[int], list[Member]]]:
    """Starts this many ranks of a gang, t0 and so on, which end with the test."""
    from tests.bench.training.gang import Member

    made: list[Member] = []

    def make(num: int) -> list[Member]:
        made.extend(Member(f"t{len(made)}") for _ in range(num))
        return made[-num:]

    yield make
    for member in made:
        member.end()


@pytest.fixture(scope="module")
def worker_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerBench]:
    """A scheduler, and workers that the test starts."""
    from sf_core.cli.stack.local import local_stack
    from tests.bench.workers import WorkerBench

    folder = tmp_path_factory.mktemp("workers")
    # nothing computes here: workers start without torch
    with local_stack(folder / "logs", {"PYTHONPATH": str(ROOT), "SF_EMULATED": "1"}) as stack:
        yield WorkerBench(stack, folder)


# --- repositories


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Library]:
    """Two small libraries with tests, as if they were installed."""
    from tests.bench.repositories import make_libraries

    return make_libraries(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="session")
def generated(libraries: list[Library], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with dataset.jsonl and repositories, generated of `libraries`."""
    from examples.repositories.generate import generate
    from tests.bench.sandboxes import need_sandbox

    need_sandbox()
    folder = tmp_path_factory.mktemp("generated")
    asyncio.run(generate(folder, libraries, per_library=2))
    return folder


@pytest.fixture
def make_repositories(generated: Path) -> Callable[..., Repositories]:
    """Makes environments of the generated repositories, with these settings."""
    from sf_core.environments.repositories.environment import Repositories

    places = {"dataset": str(generated / "dataset.jsonl"), "repositories": str(generated / "repositories")}
    return lambda **settings: Repositories.model_validate(places | {"held_out": 0.5} | settings)


# --- surroundings


@pytest.fixture
def bubblewrap() -> None:
    """Skips the test where no sandbox can be made."""
    from tests.bench.sandboxes import need_sandbox

    need_sandbox()


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """URL of a bucket on the server that the environment names. All tests share it, because filesystems are
    cached per process with the server that they were made for."""
    with s3_server() as env, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        make_bucket(env)
        yield f"s3://{BUCKET}"


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentProxy]:
    """Proxy named in this process's environment. Request it last, so that other fixtures do not use it."""
    with silent_proxy() as proxy:
        for name, value in proxy.environment.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture(scope="session")
def vllm() -> str:
    """Python of the environment that has vLLM. Each test that needs vLLM requests this fixture, directly or
    through another one; tests/conftest.py makes it a system test."""
    from sf_core.process.environment_variables import vllm_python

    try:
        return vllm_python()
    except FileNotFoundError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Browser of one module: its event loop runs in the main thread, where other tests start theirs."""
    program = shutil.which("chromium")
    if program is None:
        if os.environ.get("CI") == "true":
            raise FileNotFoundError("chromium is not installed; .ci/run installs Debian's")
        pytest.skip("chromium is not installed; Debian's package chromium has it")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=patience() * 1000)
    with sync_playwright() as playwright:
        # no sandbox: tests may run as root; no WebGL: a run's page in Prefect would draw all the time
        arguments = ["--no-sandbox", "--disable-3d-apis"]
        # names of strangers lead to this machine
        arguments.append("--host-resolver-rules=MAP *.test 127.0.0.1")
        chromium = playwright.chromium.launch(executable_path=program, args=arguments)
        yield chromium
        chromium.close()
