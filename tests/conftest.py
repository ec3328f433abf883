from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.s3_server import BUCKET, make_bucket, s3_server


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """URL of a bucket on a server that the environment names. One for all tests: filesystems are kept by
    process, and know the server they were made for."""
    with s3_server() as env, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        make_bucket(env)
        yield f"s3://{BUCKET}"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        if os.environ.get("CI") == "true":
            raise FileNotFoundError("chromium is not installed; .ci/run installs Debian's")
        pytest.skip("chromium is not installed; Debian's package chromium has it")
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        # no sandbox: tests may run as root; no WebGL: a run's page in Prefect would draw all the time
        arguments = ["--no-sandbox", "--disable-3d-apis"]
        chromium = playwright.chromium.launch(executable_path=program, args=arguments)
        yield chromium
        chromium.close()
