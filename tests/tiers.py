"""Run a tier of the tests: `python -m tests.tiers fast` or `system`. The fast tier runs `make check` beside
its tests. The last lines say what the tier cost, and which tests of the system tier are flaky: they failed
beside others and passed alone."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

TIERS = {"fast": "not system and not nightly and not gpu", "system": "system and not nightly and not gpu"}
PROCESSES = 3
"""One more than two cores: tests also wait for what they started."""
_FAILED = Path(".pytest_cache/v/cache/lastfailed")
_PR_SET_CHILD_SUBREAPER = 36


def main(tier: str) -> int:
    # what outlives its parent becomes our child, so that its CPU time is counted as well
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began = time.monotonic()
    beside = ["--numprocesses", str(PROCESSES), "--dist", "loadgroup", "--no-loadscope-reorder"]
    checking = start_check() if tier == "fast" else None
    status = run_pytest("-m", TIERS[tier], *beside)
    if checking:
        output, _ = checking.communicate()
        print(output, flush=True)
        status = status or checking.returncode
    flaky: list[str] = []
    if tier == "system" and status == 1:
        failed = read_failed()
        print("\nwhat failed runs once more, alone", flush=True)
        status = run_pytest("-m", TIERS[tier], "--last-failed", "--last-failed-no-failures", "none")
        flaky = sorted(failed - read_failed()) if status in (0, 1) else []
    reap_orphans()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    print(f"{tier} tier: {time.monotonic() - began:.0f} s, {cpu_s:.0f} CPU-seconds", flush=True)
    for name in flaky:
        print(f"FLAKY: {name}", flush=True)
    return status


def start_check() -> subprocess.Popen[str]:
    """`make check` in the time that the tests leave."""
    command = ["nice", "-n", "19", "make", "--no-print-directory", "check"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments]).returncode


def read_failed() -> set[str]:
    return set(json.loads(_FAILED.read_text())) if _FAILED.exists() else set()


def reap_orphans() -> None:
    """Collect orphans that have ended; the kernel counts their CPU time when they are waited for."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
