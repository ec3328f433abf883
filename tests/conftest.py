from __future__ import annotations

from collections.abc import Iterator

import pytest

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
