"""The product of docs/guides/agents/product.md, and callers that ask it and rate what it answers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tests.bench import ROOT
from tests.bench.stacks.desk_package import QUESTIONS, stars
from tests.bench.waits import patience, wait_until

PAGE = (ROOT / "docs" / "guides" / "agents" / "product.md").read_text(encoding="utf-8")


class Desk:
    """The product in a process of its own, and callers that ask and rate as long as the test lasts."""

    def __init__(self, folder: Path, **env: str) -> None:
        code = re.search(r"```python\n(.*?)```", PAGE, re.S)
        assert code is not None
        (folder / "desk.py").write_text(code[1], encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._folder = folder
        self._env = os.environ | env
        self.rated: dict[str, float] = {}
        """Stars by session, of the ratings that were taken."""
        self.num_untrained = 0
        """Answers of which nothing is learned."""
        self._is_over = threading.Event()
        self._callers = [threading.Thread(target=self._call, args=(number,)) for number in range(6)]
        self.start()

    def start(self) -> None:
        command = ["uvicorn", "desk:app", "--port", str(self.port), "--log-level", "warning"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=self._folder, env=self._env | {"PYTHONPATH": str(ROOT)}
        )
        wait_until(self._listens, "the desk", every_s=0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def open(self) -> None:
        for caller in self._callers:
            caller.start()

    def close(self) -> None:
        self._is_over.set()
        # and so ends the callers' waits
        self.kill()
        for caller in self._callers:
            if caller.is_alive():
                caller.join()

    def ask(self, question: str) -> httpx.Response:
        return self._post("/ask", {"question": question})

    def _post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.port}{path}", json=body, timeout=patience())

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _call(self, number: int) -> None:
        while not self._is_over.wait(0.05):
            try:
                asked = self.ask(QUESTIONS[number % len(QUESTIONS)])
                if asked.status_code == 200:
                    self._rate(asked.json()["drafts"])
            except httpx.TransportError:
                time.sleep(0.1)  # killed, and not started yet

    def _rate(self, drafts: list[dict[str, Any]]) -> None:
        for draft in drafts:
            if draft["id"] is None:
                self.num_untrained += 1
            elif self._post("/rate", {"id": draft["id"], "stars": stars(draft["text"])}).status_code == 200:
                self.rated[draft["id"]] = stars(draft["text"])
