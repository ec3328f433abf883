"""An S3 server (moto's) as a process of its own, and the environment variables to use it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx

from tests.bench.waits import patience

BUCKET = "bucket"


@contextmanager
def s3_server(env: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Yields the AWS_* variables under which the server is reached; the bucket is not made yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _await(f"http://127.0.0.1:{port}/moto-api/", process, timeout_s=60)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.kill()
        process.wait()


def make_bucket(env: Mapping[str, str]) -> None:
    httpx.put(f"{env['AWS_ENDPOINT_URL']}/{BUCKET}").raise_for_status()


def _await(url: str, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            httpx.get(url, timeout=patience())
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(f"moto's server did not answer within {timeout_s:.0f} s (code {process.poll()})")
