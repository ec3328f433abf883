"""Fixtures that several folders of tests use, each named after what it gives. pytest loads this file at every
start, so that what takes long to import is imported where it is used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.bench.proxies import SilentProxy, silent_proxy
from tests.bench.s3_server import BUCKET, make_bucket, s3_server
from tests.patience import join, patience

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from examples.repositories.libraries import Library
    from sf_core.dataplane.chat.renderer import Renderer
    from sf_core.environments.repositories.environment import Repositories
    from tests.bench.canned_model import CannedModel
    from tests.bench.dataplane.planes import ServedPlane
    from tests.bench.dataplane.restarts import Restarts
    from tests.bench.engines.model_folders import ModelFolders

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
    """A data plane without a key, in a process of its own, without a run."""
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
        chromium = playwright.chromium.launch(executable_path=program, args=arguments)
        yield chromium
        chromium.close()
