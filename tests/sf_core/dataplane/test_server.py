from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.server import serve
from tests.bench.waits import patience, wait_until

COMMAND = [sys.executable, "-m", "sf_core", "dataplane"]


@pytest.fixture
def port_file(tmp_path: Path) -> Path:
    return tmp_path / "port"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Temporary folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def process(port_file: Path, short_folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [*COMMAND, "--port", "0", "--port-file", str(port_file)]
    environment = {**os.environ, "SF_DATAPLANE_KEY": "secret", "TMPDIR": str(short_folder)}
    with subprocess.Popen(command, env=environment) as process:
        yield process
        process.kill()


def test_the_process_says_where_it_listens_and_ends_when_told(
    process: subprocess.Popen[bytes], port_file: Path, short_folder: Path
) -> None:
    wait_until(port_file.exists)
    url = f"http://127.0.0.1:{port_file.read_text(encoding='utf-8')}/healthz"
    assert httpx.get(url, headers={"Authorization": "Bearer secret"}, timeout=patience()).json() == {
        "runs": 0
    }
    assert httpx.get(url).status_code == 401
    process.send_signal(signal.SIGTERM)
    process.wait(patience())
    assert list(short_folder.iterdir()) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_without_a_key_only_loopback_is_served(host: str) -> None:
    with pytest.raises(ValueError, match="set SF_DATAPLANE_KEY, or serve on"):
        serve(host, 0, DataplaneOptions(), key="of-the-account", welcomes_strangers=True)
