"""Passes an agent's requests on to an endpoint elsewhere, and prints what is asked and answered."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sf_core.cli.serving.conversation import Printer, in_words
from sf_core.dataplane.chat.json_text import repair_json
from sf_core.dataplane.connections import note_caller
from sf_core.dataplane.control.client import tls
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.access import Caller, Keys
from sf_core.dataplane.gateway.dialects.registry import find_dialect
from sf_core.dataplane.sessions.session import Session
from storage.json_files import load_json

_OURS = {"host", "content-length", "accept-encoding", "connection", "upgrade", "authorization", "x-api-key"}
"""Headers that are not passed on as they came."""

ANSWER_S = 600.0


class Forward:
    """An ASGI application in front of an endpoint."""

    def __init__(self, url: str, key: str, printer: Printer) -> None:
        self._above = url.rstrip("/").removesuffix("/v1")
        self._keys = {"authorization": f"Bearer {key}", "x-api-key": key, "x-goog-api-key": key}
        self._printer = printer
        self.agents_key = secrets.token_urlsafe(24)
        """What the agent must send: nobody else is to use the key of the endpoint."""
        self._printed: list[dict[str, Any]] = []
        self._num_requests = 0
        self.has_asked = False
        self.num_answers = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            caller = Caller.from_scope(scope, Keys(self.agents_key))
            refusal = caller.refusal()
            refused = JSONResponse(refusal.body(), refusal.status)
            if caller.is_operator:
                note_caller(scope, shows_key=True)
            response = await self._pass_on(Request(scope, receive)) if caller.is_operator else refused
            await response(scope, receive, send)

    async def _pass_on(self, request: Request) -> Response:
        body = await request.body()
        path = request.url.path
        self.has_asked = True
        number = self._num_requests
        self._num_requests += 1
        self._show_request(number, path, body)
        headers = {name: value for name, value in request.headers.items() if name not in _OURS} | self._keys
        http = httpx.AsyncClient(timeout=ANSWER_S, verify=tls())
        url = self._above + path
        params = httpx.QueryParams(str(request.query_params)).remove("key")
        try:
            sent = http.build_request(request.method, url, params=params, headers=headers, content=body)
            answer = await http.send(sent, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            await http.aclose()
            failure = f"{url}: {type(error).__name__}: {error}"
            self._printer.print_part("no answer", failure, "bold red")
            self._printer.answer_to(number, error=failure)
            return JSONResponse(ApiError(502, failure).body(), 502)

        async def parts() -> AsyncIterator[bytes]:
            read = []
            try:
                async for part in answer.aiter_bytes():
                    read.append(part)
                    yield part
            finally:
                await answer.aclose()
                await http.aclose()
                self._show_answer(number, answer.status_code, b"".join(read))

        media = answer.headers.get("content-type", "application/json")
        return StreamingResponse(parts(), answer.status_code, media_type=media)

    def _show_request(self, number: int, path: str, body: bytes) -> None:
        self._printer.request(number, [])
        if (dialect := find_dialect(path)) is None:
            return
        try:
            sent, _ = repair_json(body)
            requests = dialect.parse(dialect.read(sent, path), Session("try"))
            messages = [message for request in requests for message in request.messages]
        except (ValueError, ApiError):  # the endpoint may know what our gateway does not
            return self._printer.print_part("request", body.decode(errors="replace"))
        is_longer = messages[: len(self._printed)] == self._printed
        added = messages[len(self._printed) if is_longer else 0 :]
        for message in added:
            if not (is_longer and message.get("role") == "assistant"):  # printed as it was answered
                self._printer.message(message)
        self._printer.request(number, added)
        self._printed = messages

    def _show_answer(self, number: int, status: int, body: bytes) -> None:
        text = body.decode(errors="replace")
        if status >= 400:
            self._printer.answer_to(number, error=f"refused with {status}: {text}")
            return self._printer.print_part(f"refused with {status}", text, "bold red")
        answer = "".join(_read_texts(text))
        self._printer.answer_to(number, message={"role": "assistant", "content": answer})
        if answer:
            self.num_answers += 1
            self._printer.print_part("assistant", answer, "bold green")


def _read_texts(body: str) -> Iterator[str]:
    """What a body, whole or a stream of events, says to people."""
    if "data:" in body[:200]:
        for line in body.splitlines():
            if line.startswith("data:") and line[5:].strip() not in ("", "[DONE]"):
                with suppress(ValueError):  # the agent's own client tells what is wrong
                    yield from _read_event(load_json(line[5:]))
        return
    try:
        content = load_json(body)
    except ValueError:
        return
    yield from _read_answer(content)


def _read_event(event: dict[str, Any]) -> Iterator[str]:
    delta: Any = event.get("delta")
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice
        yield from _read_message(delta)
        return
    if isinstance(delta, str):
        yield delta
    elif isinstance(delta, dict):
        yield str(delta.get("text") or delta.get("partial_json") or "")
    else:
        yield from _read_answer({"candidates": event.get("candidates") or []})


def _read_answer(value: Any) -> Iterator[str]:
    """All texts and calls in an answer of any of the APIs, in order."""
    if isinstance(value, list):
        for item in value:
            yield from _read_answer(item)
    elif isinstance(value, dict):
        if "message" in value and isinstance(value["message"], dict):
            yield in_words(value["message"])
        elif isinstance(value.get("text"), str):
            yield value["text"]
        elif "name" in value and ("arguments" in value or "input" in value or "args" in value):
            arguments = next(value[key] for key in ("arguments", "input", "args") if key in value)
            yield f"calls {value['name']}({arguments})"
        else:
            for name in ("choices", "output", "content", "candidates", "parts", "functionCall"):
                yield from _read_answer(value.get(name))


def _read_message(message: dict[str, Any]) -> Iterator[str]:
    yield str(message.get("content") or message.get("text") or "")
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        name = function.get("name")
        arguments = function.get("arguments") or ""
        yield f"calls {name}({arguments})" if name else arguments
