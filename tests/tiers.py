"""Run a tier of the tests: `python -m tests.tiers fast`, `system` or `smoke`. The fast tier runs `make check`
beside its tests. The smoke tier has a few folders, for other Pythons and packages (tests/pythons.py). The
last lines say what the tier cost, and which tests are flaky: they failed beside others and passed alone."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

TIERS = {
    "fast": "not system and not nightly and not gpu",
    "system": "system and not nightly and not gpu",
    "smoke": "not nightly and not gpu",
}
LEFT_OUT = {
    "fast": ["tests/e2e", "tests/gpu", "tests/bad_input/test_openapi_nightly.py"],
    "system": ["tests/gpu", "tests/bad_input/test_openapi_nightly.py"],
    "smoke": [],
}
"""Folders and files without a test of the tier, which each process would import for nothing."""
PROCESSES = 3
"""One more than two cores: tests also wait for what they started."""
_PROJECT = Path("pyproject.toml")
_FAILED = Path(".pytest_cache/v/cache/lastfailed")
_PR_SET_CHILD_SUBREAPER = 36


def main(tier: str) -> int:
    # what outlives its parent becomes our child, so that its CPU time is counted as well
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # sets of strings have the same order on every machine
    os.environ["PYTHONHASHSEED"] = "0"
    began = time.monotonic()
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        TIERS[tier],
        *(f"--ignore={path}" for path in LEFT_OUT[tier]),
    ]
    if tier == "smoke":
        pytest += tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["tool"]["seamlessflow"]["smoke"]
    beside = ["--numprocesses", str(PROCESSES), "--dist", "loadgroup", "--no-loadscope-reorder"]
    flaky: list[str] = []
    checked = 0
    if tier == "fast":
        # a test that needs vLLM fails on every machine here, as it does where `make vllm` was never run
        os.environ["SF_VLLM_PYTHON"] = "/vllm/is/for/the/system/tier"
        tested, checked = run_with_check([*pytest, *beside])
    else:
        tested = run([*pytest, *beside])
    if tested == 1:
        failed = read_failed()
        print("\nwhat failed runs once more, alone", flush=True)
        # a test that failed in time is not skipped
        os.environ.pop("SF_TESTS_END", None)
        tested = run([*pytest, "--last-failed", "--last-failed-no-failures", "none"])
        flaky = sorted(failed - read_failed()) if tested in (0, 1) else []
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    print(f"{tier} tier: {time.monotonic() - began:.0f} s, {cpu_s:.0f} CPU-seconds", flush=True)
    for name in flaky:
        print(f"FLAKY: {name}", flush=True)
    return tested or checked


def run(command: list[str]) -> int:
    [status] = await_ends(subprocess.Popen(command))
    return status


def run_with_check(command: list[str]) -> list[int]:
    """Run the tests, and `make check` in the time that they leave; print its output when both have ended.
    Returns the exit codes of both."""
    check = ["nice", "-n", "19", "make", "--no-print-directory", "check"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        checking = subprocess.Popen(check, stdout=said, stderr=subprocess.STDOUT)
        codes = await_ends(subprocess.Popen(command), checking)
        said.seek(0)
        print(said.read(), flush=True)
    return codes


def await_ends(*processes: subprocess.Popen[bytes]) -> list[int]:
    """Wait for these processes, and collect every orphan that ends meanwhile, as init would: tests wait for
    processes to be gone. Returns exit codes."""
    codes: dict[int, int] = {}
    while not codes.keys() >= {process.pid for process in processes}:
        pid, status = os.waitpid(-1, 0)
        codes[pid] = os.waitstatus_to_exitcode(status)
    for process in processes:
        process.returncode = codes[process.pid]
    return [codes[process.pid] for process in processes]


def read_failed() -> set[str]:
    return set(json.loads(_FAILED.read_text(encoding="utf-8"))) if _FAILED.exists() else set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
