from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from playwright.sync_api import Browser, expect, sync_playwright

from tests.patience import patience
from tests.proxies import SilentProxy, silent_proxy
from tests.s3_server import BUCKET, make_bucket, s3_server

# how long an example takes is the machine's matter
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# set in the workers of pytest-xdist; a console that is made then keeps this width
os.environ.pop("COLUMNS", None)


TOGETHER = {
    # they use one vLLM server
    "vllm": ("sf_core/engines/vllm/test_adopted", "sf_core/engines/vllm/test_contract"),
    # they read one data set, which takes a while to generate
    "repositories": (
        "examples/repositories/test_generate",
        "sf_core/environments/repositories/test_check",
        "sf_core/environments/repositories/test_patches",
        "sf_core/environments/repositories/test_repositories",
    ),
    # they read one run, which takes a minute or two to train
    "the quickstart": ("e2e/test_data", "e2e/test_object_store", "e2e/test_quickstart"),
    # they use one Prefect server
    "deployments": tuple(
        f"e2e/test_{name}" for name in ("browser", "cancel", "deployments", "lost_runs", "user_package")
    ),
    "faults": tuple(f"e2e/test_{name}" for name in ("elastic", "gang", "pipelines", "resume")),
}
"""Files whose tests run one after the other in one process, so that they share what is dear to start: the
cluster, and what the comments say."""
GROUPS = {f"tests/{name}.py": group for group, names in TOGETHER.items() for name in names}


E2E = Path(__file__).parent / "e2e"
STACKS = {"browser", "cluster", "podman", "vllm"}
"""Fixtures whose tests are system tests; `maker` has podman by a parameter."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests without collecting garbage, which would visit 1.4 million objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the system tests, and put those on the cluster first, because they take longest."""
    for item in items:
        if _needs_a_stack(item):
            item.add_marker(pytest.mark.system)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: "cluster" not in item.fixturenames)


def _needs_a_stack(item: pytest.Item) -> bool:
    makers = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return E2E in item.path.parents or not STACKS.isdisjoint(item.fixturenames) or "podman" in makers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by file, because the tests of a file share fixtures, and some files together. Marks
    cannot say this: pytest 9.2 with pytest-xdist 3.8 silently ignores groups."""
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return GROUPS.get(file, file)

    return ByFile(config, log)


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
    expect.set_options(timeout=patience() * 1000)
    with sync_playwright() as playwright:
        # no sandbox: tests may run as root; no WebGL: a run's page in Prefect would draw all the time
        arguments = ["--no-sandbox", "--disable-3d-apis"]
        chromium = playwright.chromium.launch(executable_path=program, args=arguments)
        yield chromium
        chromium.close()
