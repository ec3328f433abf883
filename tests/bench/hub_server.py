"""A server that speaks the part of the Hugging Face Hub's API with which huggingface_hub creates a repository
and commits files, small ones within the commit, large ones by the protocol of Git LFS."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_a_test"


@dataclass
class Commit:
    message: str
    revision: str
    files: dict[str, bytes]


@dataclass
class Repository:
    private: bool
    branches: set[str] = field(default_factory=lambda: {"main"})
    commits: list[Commit] = field(default_factory=list)


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """Content of large files by their SHA-256."""
    refuse: dict[str, int] = field(default_factory=dict)
    """Statuses with which requests are refused whose path contains a text."""
    asked: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        body = self._body()
        self.hub.asked.append(f"{self.command} {self.path}")
        status = next((s for part, s in self.hub.refuse.items() if part in self.path), 0)
        is_large = self.path.startswith("/large/")
        if not is_large and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status = 401
        if status:
            return self._send(status, {"error": f"refused with {status}"})
        path = self.path.partition("?")[0].strip("/").split("/")
        is_known = path[:2] != ["api", "models"] or "/".join(path[2:4]) in self.hub.repositories
        if is_known:
            self._send(200, self._do(path, body))
        else:
            self._send(404, {"error": "Repository not found"})

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _do(self, path: list[str], body: bytes) -> dict[str, Any]:
        match path:
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                repo = f"{asked.get('organization') or 'jane'}/{asked['name']}"
                # versions of huggingface_hub ask in two ways
                private = asked.get("private") is True or asked.get("visibility") == "private"
                self.hub.repositories.setdefault(repo, Repository(private))
                return {"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo}
            case ["api", "validate-yaml"]:
                return {"errors": [], "warnings": []}
            case ["large", oid]:
                self.hub.large[oid] = body
                return {}
            case ["api", "models", owner, name]:
                private = self.hub.repositories[f"{owner}/{name}"].private
                return {"id": f"{owner}/{name}", "private": private, "siblings": [], "tags": []}
            case ["api", "models", owner, name, "branch", branch]:
                self.hub.repositories[f"{owner}/{name}"].branches.add(branch)
                return {}
            case ["api", "models", _, _, "preupload", _]:
                return {"files": [self._mode(file["path"]) for file in json.loads(body)["files"]]}
            case [_, _, "info", "lfs", "objects", "batch"]:
                return {"transfer": "basic", "objects": [self._place(o) for o in json.loads(body)["objects"]]}
            case ["api", "models", owner, name, "commit", revision]:
                made = self._commit(f"{owner}/{name}", revision, body)
                return {"commitUrl": f"{self.hub.url}/{owner}/{name}/commit/{made}", "commitOid": made}
        raise ValueError(f"not a request of a push: {self.command} {self.path}")

    def _mode(self, path: str) -> dict[str, Any]:
        is_large = path.endswith(".safetensors")
        return {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.hub.url}/large/{wanted['oid']}"
        return {**wanted, "actions": {"upload": {"href": href}}}

    def _commit(self, repo: str, revision: str, body: bytes) -> str:
        header, *entries = [json.loads(line) for line in body.splitlines()]
        files = {}
        for entry in entries:
            value = entry["value"]
            is_large = entry["key"] == "lfsFile"
            content = self.hub.large[value["oid"]] if is_large else base64.b64decode(value["content"])
            files[value["path"]] = content
        kept = self.hub.repositories[repo]
        assert revision in kept.branches
        kept.commits.append(Commit(header["value"]["summary"], revision, files))
        return f"{len(kept.commits):040x}"

    def _send(self, status: int, data: dict[str, Any]) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
