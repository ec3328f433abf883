"""Hosts of a test: network namespaces on a common switch, which share the machine's files."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.bench.waits import patience

R = TypeVar("R")
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    namespace: str
    address: str
    switch: str

    @property
    def exec(self) -> tuple[str, ...]:
        """Words in front of a command that make it run on this host."""
        return ("ip", "netns", "exec", self.namespace)

    def call(self, function: Callable[[], R]) -> R:
        """Call a function in this host's network, in a thread of its own."""
        with ThreadPoolExecutor(1, initializer=_enter, initargs=(self.namespace,)) as pool:
            return pool.submit(function).result()

    def cut(self) -> None:
        """Disconnect the host from the switch."""
        _ip("-n", self.switch, "link", "set", self.namespace, "down")

    def mend(self) -> None:
        _ip("-n", self.switch, "link", "set", self.namespace, "up")


@contextmanager
def hosts(num_hosts: int) -> Iterator[list[Host]]:
    """Hosts on one switch. Skips if namespaces cannot be made; a missing `ip` is an error in CI."""
    switch = f"sf{os.getpid()}"
    _make_first(switch)
    made = [switch]
    try:
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        found = [Host(f"{switch}-{n}", f"198.18.0.{n}", switch) for n in range(1, num_hosts + 1)]
        for host in found:
            name = host.namespace
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", switch)
            _ip("-n", name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")
            _ip("-n", switch, "link", "set", name, "master", "bridge", "up")
        yield found
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _make_first(namespace: str) -> None:
    """Make a namespace. Skips if this machine forbids it, in CI too, because no package changes that."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None and os.environ.get("CI") != "true":
        pytest.skip("`ip` is not installed (apt-get install iproute2)")
    done = subprocess.run(["ip", "netns", "add", namespace], capture_output=True, encoding="utf-8")
    if done.returncode:
        pytest.skip(f"network namespaces are refused here: {done.stderr.strip()}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=patience())


def _enter(namespace: str) -> None:
    with open(Path("/run/netns") / namespace, encoding="utf-8") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
