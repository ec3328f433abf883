"""A small run with weights, and `sf serve` in a process of its own."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import openai

from sf_core.models.builtin import make_policy
from storage.run_directory import RunDirectory
from tests.bench.runs import commit, configure
from tests.bench.waits import patience, wait_until

KEY = "a-key-of-mine"


def publish_run(folder: Path, **policy: int | None) -> RunDirectory:
    """A run that has published versions 1 to 3, of which 1 is not kept."""
    run = RunDirectory(str(folder / "taught"))
    small = {"hidden_size": 32, "num_layers": 1, "warmstart": None}
    sections = {"policy": small | policy, "storage": {"root": str(folder)}, "train": {"iterations": 3}}
    config = configure(run, **sections)
    make_policy(run.start_dir, config.policy, 0)
    commit(run, None, "start", data={"dtype": "float32"})
    for iteration in range(3):
        for stage in ("rollout", "filter", "train", "publish"):
            commit(run, iteration, stage, data={})
    for version in (2, 3):
        Path(run.weights_dir(version)).mkdir(parents=True)
        shutil.copy(Path(run.start_dir, "model.safetensors"), run.weights_dir(version))
    return run


class Served:
    """`sf serve` in a process of its own."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self._log = log
        command = [sys.executable, "-m", "sf_core", "serve", *arguments, "--port", "0", "--key", KEY]
        with open(log, "w", encoding="utf-8") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        wait_until(
            lambda: self.process.poll() is not None or "ANTHROPIC_API_KEY" in log.read_text(encoding="utf-8")
        )
        assert self.process.poll() is None, log.read_text(encoding="utf-8")

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        return self.output.partition("OPENAI_BASE_URL=")[2].partition("/v1")[0]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(patience())


def check_answers(url: str, model: str = "policy") -> None:
    """Check that the server at this URL answers a chat completion."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        reply = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=4
        )
    assert reply.usage is not None
    assert reply.usage.completion_tokens in range(1, 5)


def check_printed_use(output: str, log: Path) -> None:
    """Check that the command with which `sf train` says how to use the policy serves it. It is run as it is
    printed, with a port and a key."""
    [printed] = re.findall("^  use it +(.+)$", output, re.MULTILINE)
    program, verb, *arguments = shlex.split(printed)
    assert (program, verb) == ("sf", "serve")
    served = Served(*arguments, log=log)
    try:
        check_answers(served.url)
    finally:
        code = served.end()
    assert (code, served.output.splitlines()[-1]) == (0, "stopped")
