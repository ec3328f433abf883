"""Requests to every dialect."""

from __future__ import annotations

from typing import Any

import httpx

from tests.bench.dataplane.planes import ServedPlane

HI = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/v1/models/policy:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
}


def ask(plane: ServedPlane, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    body = {"model": "policy"} | REQUESTS.get(path, {}) | fields
    response = httpx.post(plane.url + path, json=body, headers=plane.agent_headers(path))
    return response.status_code, response.json()
