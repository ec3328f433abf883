from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import certifi
import pytest

pytest_plugins = ["tests.bench.fixtures", "tests.bench.properties"]

# set in the workers of pytest-xdist; a console that is made then keeps this width
os.environ.pop("COLUMNS", None)

# torch's threads otherwise spin while they wait for each other, which takes longer than what tests compute
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

# each client of HTTP reads the authorities that it trusts. Those of a system take 20 ms, and tests need none
# but for pip, which has a variable of its own
os.environ.setdefault("PIP_CERT", os.environ.get("SSL_CERT_FILE") or certifi.where())
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "data/authority.pem")
os.environ.pop("SSL_CERT_DIR", None)

# what a shell starts in the background ignores Ctrl-C, and so would every process that a test starts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


ON_ONE_SERVER = ("browser", "cancel", "deployments", "lost_runs", "strange_pages", "user_package")
TOGETHER = {
    # they use one vLLM server
    "vllm": tuple(f"sf_core/engines/vllm/test_{name}" for name in ("contract", "kv", "teacher")),
    # they read one data set, which takes a while to generate
    "repositories": (
        "examples/repositories/test_generate",
        "sf_core/environments/repositories/test_check",
        "sf_core/environments/repositories/test_patches",
        "sf_core/environments/repositories/test_repositories",
    ),
    # they import Megatron Core, which takes seconds
    "megatron": tuple(f"sf_core/training/megatron/test_{name}" for name in ("backend", "megatron_model")),
    # they read one site, which takes a while to build
    "the site": ("docs/test_images", "docs/test_site"),
    # half of the tests of the cluster, with those that read one run, which takes a minute or two to train
    "the quickstart": tuple(
        f"e2e/test_{name}"
        for name in ("data", "gang", "joining", "object_store", "pipelines", "quickstart", "resume")
    ),
    # the other half, with those that use one Prefect server
    "deployments": tuple(f"e2e/test_{name}" for name in (*ON_ONE_SERVER, "lora", "sweep")),
}
"""Files whose tests run one after the other in one process, so that they share what is dear to start: the
cluster, and what the comments say."""
GROUPS = {f"tests/{name}.py": group for group, names in TOGETHER.items() for name in names}


END = float(os.environ.get("SF_TESTS_END", "inf"))
"""Unix time after which no test begins. `.ci/run` sets it, because a slow CI ends without a verdict."""

E2E = Path(__file__).parent / "e2e"
STACKS = {"browser", "cluster", "podman", "vllm"}
"""Fixtures whose tests are system tests; `maker` has podman by a parameter."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests without collecting garbage, which would visit 1.4 million objects that stay. Later,
    collect garbage more rarely than by default, which takes 6 % of the time of the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the system tests, and put those on the cluster first, because they take longest."""
    for item in items:
        if _needs_a_stack(item):
            item.add_marker(pytest.mark.system)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: "cluster" not in item.fixturenames)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > END:
        pytest.skip("not run: SF_TESTS_END has passed")


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
