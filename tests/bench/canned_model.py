"""A model that is no model: an HTTP server with prepared answers."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sf_core.types import Endpoint


class CannedModel:
    """An OpenAI-compatible server that gives prepared answers and keeps the requests."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                model.requests.append(json.loads(body))
                message = {"role": "assistant", "content": None, **model.answers.pop(0)}
                reason = message.pop("finish_reason", "stop")
                choice = {"index": 0, "finish_reason": reason, "message": message}
                completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(completion | {"choices": [choice]}).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = Endpoint(f"http://127.0.0.1:{self.server.server_port}/v1", "key", "policy")
