from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.s3_server import BUCKET, make_bucket, s3_server

# set in the workers of pytest-xdist; a console that is made then keeps this width
os.environ.pop("COLUMNS", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The cluster is many processes: all tests on it go to the same worker of pytest-xdist."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("cluster"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Work is dealt out by groups, and beside them by files, whose tests share fixtures too."""
    from xdist.scheduler import LoadGroupScheduling

    class ByGroupOrFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).partition("::")[0]

    return ByGroupOrFile(config, log)


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """URL of a bucket on a server that the environment names. One for all tests: filesystems are kept by
    process, and know the server they were made for."""
    with s3_server() as env, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        make_bucket(env)
        yield f"s3://{BUCKET}"
