"""`sf serve --engine vllm`, and vLLM's own server on the folder of a policy."""

from __future__ import annotations

import shlex
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from sf_core.cli.stack.local import free_port
from tests.bench import policy_server, waits

PAGE = Path(__file__).parents[4] / "docs" / "guides" / "training" / "exports.md"

# tests/sf_core/cli/serving has `sf serve`, test_contract.py has vLLM's server
pytestmark = pytest.mark.nightly


def test_a_stored_policy_is_served_by_vllm(vllm: str, tmp_path: Path) -> None:
    # its CPU build knows no narrower heads
    run = policy_server.publish_run(tmp_path, hidden_size=64)
    served = policy_server.Served(run.uri, "--engine", "vllm", log=tmp_path / "log")
    try:
        policy_server.check_answers(served.url)
    finally:
        code = served.end()
    assert (code, served.output.splitlines()[-1]) == (0, "stopped")


def test_a_policy_is_served_by_vllm_itself_with_the_documented_command(vllm: str, tmp_path: Path) -> None:
    """With the command for machines without a GPU, and a port."""
    folder = policy_server.publish_run(tmp_path, hidden_size=64).start_dir
    port = free_port()
    lines = PAGE.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    [line] = [line for line in lines if line.startswith(".venvs/vllm/bin/python ")]
    command = [vllm, *shlex.split(line.replace("runs/quickstart/policy", folder))[1:]]
    command += ["--port", str(port)]
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/health", trust_env=False).status_code == 200
        return False

    try:
        waits.wait_until(is_ready, "vLLM's server", quiet_s=240, every_s=0.5)
        policy_server.check_answers(url, folder)
    finally:
        process.terminate()
        process.wait(waits.patience())
