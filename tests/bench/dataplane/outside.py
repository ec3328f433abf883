"""External agents that go on sending, and the sessions of theirs that a run directory has."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from storage.run_directory import RunDirectory
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench.waits import join, patience, wait_until

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
END = {"status": "finished", "reward": 1.0}


def stored(run_dir: str) -> Counter[str]:
    """How often each session that agents opened is in the run directory."""
    partitions = RunDirectory(run_dir).list_partitions("opened")
    rows = (row for uris in partitions.values() for uri in uris for row in to_rows(read_trajectories(uri)))
    return Counter(row.session_id for row in rows)


def await_stored(run_dir: str, acknowledged: list[str]) -> None:
    """Check that each acknowledged session gets there, and none twice."""
    wait_until(lambda: set(acknowledged) <= stored(run_dir).keys(), "all acknowledged sessions")
    assert set(stored(run_dir).values()) <= {1}


class Agents:
    """External agents, each of which opens one session after the other at a data plane, in threads."""

    def __init__(self, url: str, run_id: str = "run", number: int = 3) -> None:
        self.url = url
        self.run_id = run_id
        self.acknowledged: list[str] = []
        """Sessions whose end was answered by 200."""
        self.refusals: Counter[int] = Counter()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def await_more(self, number: int = 5) -> None:
        before = len(self.acknowledged)
        wait_until(lambda: len(self.acknowledged) >= before + number, "ends of sessions")

    def stop(self) -> None:
        self._is_over.set()
        join(*self._threads)

    def _work(self) -> None:
        with httpx.Client(base_url=self.url, timeout=patience()) as http:
            while not self._is_over.is_set():
                with contextlib.suppress(httpx.TransportError, httpx.HTTPStatusError):
                    self._take_part(http)

    def _take_part(self, http: httpx.Client) -> None:
        session_id = self._post(http, "/sessions", {"run_id": self.run_id})["session_id"]
        self._post(http, f"/sessions/{session_id}/v1/chat/completions", HI)
        self._post(http, f"/sessions/{session_id}/finish", END)
        self.acknowledged.append(session_id)

    def _post(self, http: httpx.Client, path: str, body: Any) -> Any:
        response = http.post(path, json=body)
        if response.status_code != 200:
            self.refusals[response.status_code] += 1
            self._is_over.wait(0.05)
        return response.raise_for_status().json()


@contextlib.contextmanager
def agents_at(url: str, run_id: str = "run") -> Iterator[Agents]:
    agents = Agents(url, run_id)
    try:
        yield agents
    finally:
        agents.stop()
