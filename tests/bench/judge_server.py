"""A judge that is no model: a server with the OpenAI API that answers by rules, and fails as it is told.

Run as a program it serves until it is killed: python -m tests.bench.judge_server PORT FAULTS
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "small-judge"


class JudgeServer:
    """Says `yes` to what contains 42 and else `no`, prefers the longer of two answers, and marks the end of a
    question out of ten by its length."""

    def __init__(self, faults: Sequence[str | int] = (), port: int = 0) -> None:
        """`faults` are what comes of calls in turn: "" for an answer, a status, `garbage` for a reply that
        says nothing, `broken` for one that is no JSON, `slow` for one that never comes, a name of
        NO_VERDICTS for one that does not count."""
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self._faults = itertools.cycle(faults or [""])
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, json.dumps({"data": [{"id": MODEL}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.requests.append(body)
                    server.keys.append(self.headers["Authorization"])
                    fault = next(server._faults)
                if fault == "slow":
                    time.sleep(60)
                elif isinstance(fault, int):
                    self._send(fault, b'{"error": {"message": "told to fail"}}')
                elif fault == "broken":
                    self._send(200, b"<html>")
                else:
                    self._send(200, json.dumps(answer(body, str(fault))).encode())

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        ThreadingHTTPServer.daemon_threads = True
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    @contextmanager
    def serving(self) -> Iterator[JudgeServer]:
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()


_CALL = {"id": "c", "type": "function", "function": {"name": "mark", "arguments": "{}"}}

NO_VERDICTS: dict[str, dict[str, Any]] = {
    "length": {"finish_reason": "length", "content": "Score: 1"},
    "length while it thinks": {"finish_reason": "length", "content": None, "reasoning": "Score: 1"},
    "content_filter": {"finish_reason": "content_filter", "content": "Score: 1"},
    "refusal": {"content": None, "refusal": "Score: 1? I cannot help."},
    "tool_calls": {"finish_reason": "tool_calls", "content": "Score: 1", "tool_calls": [_CALL]},
    "reasoning": {"content": None, "reasoning_content": "Score: 1"},
    "reasoning in tags": {"content": "<think>\nScore: 1\n</think>\n"},
    "reasoning without an end": {"content": "<think>Score: 1"},
    "empty": {"content": None},
    "blank": {"content": " \n"},
    "no end": {"finish_reason": None, "content": "Score: 1"},
}
"""Replies that are no verdicts: the fields of their messages, and why they ended."""


def answer(body: dict[str, Any], fault: str = "") -> dict[str, Any]:
    """The completion of a request."""
    asked = body["messages"][-1]["content"]
    said = f"{len(asked) % 11}"
    likely = {}
    if "Answer A:" in asked:
        first, second = asked.split("Answer A:\n")[1].split("\n\nWhich ")[0].split("\n\nAnswer B:\n")
        said = "A" if len(first) > len(second) else "B"
        likely = {said: 0.9, "B" if said == "A" else "A": 0.1}
    elif body.get("logprobs"):
        said = " Yes" if "42" in asked else "no"
        likely = {
            said: 0.6,
            "YES" if "42" in asked else "No": 0.2,
            "maybe": 0.1,
            "n" if "42" in asked else "y": 0.1,
        }
    if fault == "garbage":
        said = "as an AI"
        likely = {"as": 0.9, "AI": 0.1}
    is_cut = body.get("max_tokens") == 1
    told = {"finish_reason": "length" if is_cut else "stop", "content": said} | NO_VERDICTS.get(fault, {})
    choice: dict[str, Any] = {"finish_reason": told.pop("finish_reason")}
    choice["message"] = {"role": "assistant", **told}
    if body.get("logprobs"):
        top = [{"token": token, "logprob": math.log(p)} for token, p in likely.items()]
        choice["logprobs"] = {"content": [{"token": said, "top_logprobs": top}]}
    return {"choices": [choice], "usage": {"total_tokens": 10}}


@contextmanager
def judge_process(port: int, *faults: str | int) -> Iterator[subprocess.Popen[bytes]]:
    """The server as a process, which a test may kill."""
    told = json.dumps(faults)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.judge_server", str(port), told], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"serving\n"
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    serves = JudgeServer(json.loads(sys.argv[2]), int(sys.argv[1]))
    print("serving", flush=True)
    serves.server.serve_forever()
