from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from sf_core.agents.sandbox import why_no_sandbox
from tests.bench import sandboxes
from tests.sf_core.agents.sandbox.image import podman_for_tests, tests_image


@pytest.fixture(autouse=True)
def _sandbox(bubblewrap: None) -> None:
    """Tests of this folder are skipped where no sandbox can be made."""


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image that podman makes sandboxes of; a test is skipped where it cannot."""
    if shutil.which("podman") is None:
        if os.environ.get("CI") == "true":
            raise FileNotFoundError("podman is not installed; .ci/run installs Debian's")
        pytest.skip("podman is not installed; Debian's packages podman and crun have it")
    if shutil.which("apt-cache") is None:
        pytest.skip("an image is made of Debian's packages, and this host has none")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as exits:
        folder = tmp_path_factory.mktemp("podman")
        patch.setenv("PATH", f"{podman_for_tests(folder)}:{os.environ['PATH']}")
        try:
            image = exits.enter_context(tests_image(folder))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"podman keeps no images here: {error.stderr}")
        if reason := why_no_sandbox(image):
            pytest.skip(reason)
        yield image


@pytest.fixture(params=["bubblewrap", "podman"])
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the sandboxes of a test."""
    if request.param == "podman":
        monkeypatch.setattr(sandboxes, "image", request.getfixturevalue("podman"))
    return request.param
