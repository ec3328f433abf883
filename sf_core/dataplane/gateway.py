"""The agents' routes: HTTP in, turns, HTTP out. One ASGI endpoint, because it must see clients go away.

Owns reading bodies, forwarding pieces and noticing clients that go away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from sf_core.dataplane.chat_request import ChatRequest, parse_request
from sf_core.dataplane.chat_response import DONE, ChatResponse
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.inflight import Listener, Ticket, join_turn
from sf_core.dataplane.run import Run
from sf_core.dataplane.session import Session
from sf_core.dataplane.toolcalls import ToolCall
from sf_core.dataplane.turn import Pieces, TurnService

MAX_BODY_BYTES = 8 * 2**20

FindSession = Callable[[str | None, str], tuple[Run, Session]]
"""(session id, model name) -> where the request belongs. Raises ApiError."""


class ChatCompletions:
    def __init__(self, find_session: FindSession) -> None:
        self._find_session = find_session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        request = parse_request(body)
        run, session = self._find_session(scope["path_params"].get("session_id"), request.model)
        ticket = Ticket.of(scope["headers"], body)
        turn = join_turn(run, session, ticket, lambda recorded: TurnService(run, session, request, recorded))
        watcher = asyncio.ensure_future(_leave_when_gone(receive, turn))
        try:
            if request.stream:
                await _stream(turn, request, send)
            else:
                await _whole(turn, request, send)
            turn.set_delivered()
        finally:
            watcher.cancel()
            turn.leave()


async def read_body(receive: Receive) -> bytes:
    """Raises ApiError 413 for a body over the limit."""
    parts: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ApiError(400, "The client went away before its request was read.")
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"The request body is over the limit of {MAX_BODY_BYTES} bytes.")
        if not event.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _leave_when_gone(receive: Receive, turn: Listener) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    turn.leave()


async def _whole(turn: Listener, request: ChatRequest, send: Send) -> None:
    async for _ in turn.pieces():
        pass
    await send_body(send, 200, ChatResponse(_response_id(turn), request.model).whole(turn.answer()))


async def _stream(turn: Listener, request: ChatRequest, send: Send) -> None:
    response = ChatResponse(_response_id(turn), request.model)
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def forward(data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})

    await forward(response.delta({"role": "assistant", "content": ""}))
    try:
        num_calls = 0
        async for pieces in turn.pieces():
            if data := _deltas(turn, response, pieces, num_calls):
                await forward(data)
            num_calls += sum(isinstance(event, ToolCall) for event in pieces[0])
    except ApiError as error:
        # the status line is sent: only the stream itself can still say what happened
        return await forward(response.error(error.body()), more=False)
    answer = turn.answer()
    end = response.delta({}, answer.finish_reason)
    if request.include_usage:
        end += response.usage(answer)
    await forward(end + DONE, more=False)


def _deltas(turn: Listener, response: ChatResponse, pieces: Pieces, num_calls: int) -> bytes:
    events, logprobs = pieces
    data = b""
    for event in events:
        if isinstance(event, ToolCall):
            data += response.call_delta(turn.call(event, num_calls), num_calls)
            num_calls += 1
        else:
            data += response.delta({"content": event}, logprobs=logprobs)
            logprobs = None
    return data + (response.delta({"content": ""}, logprobs=logprobs) if logprobs else b"")


def _response_id(turn: Listener) -> str:
    return f"chatcmpl-{turn.turn_id}"


async def send_body(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def model_list(models: list[str]) -> dict[str, Any]:
    entries = [{"id": name, "object": "model", "created": 0, "owned_by": "seamlessflow"} for name in models]
    return {"object": "list", "data": entries}
