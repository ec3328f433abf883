"""The endpoints that turn HTTP requests of agents into turns, and turns into responses.

Owns reading bodies, forwarding pieces and noticing clients that go away, hence ASGI endpoints.

The requests of a session are read and opened in their order, even if a large one waits for threads meanwhile.
Their answers come in any order.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import orjson
from starlette.types import Receive, Scope, Send

from sf_core.dataplane.chat.messages import CHARACTERS, PLACEHOLDERS
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError, ContextOverflow, WrongField
from sf_core.dataplane.gateway.dialects.checks import (
    MAX_TOOLS_BYTES,
    Body,
    check_size,
    get_field,
    has_strict_tool,
    parse_object,
    refuse_unsupported_fields,
)
from sf_core.dataplane.gateway.dialects.protocol import Dialect, Reply
from sf_core.dataplane.gateway.normalisation import normalise
from sf_core.dataplane.large_requests import SMALL_CHARACTERS, in_thread_if, is_large_body, trim_memory_after
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.answer import Answer
from sf_core.dataplane.turns.live_turn import LiveTurns
from sf_core.dataplane.turns.opening import count_tokens, open_turns
from sf_core.dataplane.turns.request import RequestFingerprint, TurnRequest
from sf_core.dataplane.turns.subscriber import Subscriber


class RequestOrder:
    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def enter(self, session_id: str | None) -> AbstractAsyncContextManager[None]:
        """A context that the requests of a session enter one by one, in the order of their arrival. None: the
        request has a session of its own."""
        if session_id is None:
            return nullcontext()
        lock = self._locks.get(session_id)
        if lock is None:
            lock = self._locks[session_id] = asyncio.Lock()
        return lock


MAX_BODY_BYTES = 8 * 2**20
"""Most bytes of a request without its images."""

MAX_BYTES_WITH_IMAGES = 64 * 2**20
"""Most bytes of a request with images; agents send those of a whole conversation each time."""

ID_HEADERS = (b"x-request-id", b"request-id")
"""Headers in which the packages of OpenAI and Anthropic read a request's id."""

FindSession = Callable[[Scope, str], tuple[LiveTurns, Session]]
"""(connection scope, model name) -> the turns of the run and the session of the request. Raises ApiError."""


class TurnEndpoint:
    """The endpoint of a dialect that answers with turns."""

    def __init__(self, dialect: Dialect, find_session: FindSession, order: RequestOrder) -> None:
        self._dialect = dialect
        self._find_session = find_session
        self._order = order

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = await read_body(receive, MAX_BYTES_WITH_IMAGES)
        size = len(data)
        try:
            async with self._order.enter(scope["caller"].named_session):
                parsed, subscribers = await self._open_turns(data, scope)
        finally:
            trim_memory_after(size)
        reply = self._dialect.reply(parsed.body, subscribers[0].turn.turn_id, parsed.session)
        is_stream = parsed.requests[0].stream
        del data, parsed  # they may hold megabytes, and the turn may take minutes
        watcher = asyncio.ensure_future(_leave_when_gone(receive, subscribers))
        try:
            if is_stream:
                await _stream(subscribers, reply, send, scope["request_id"])
            else:
                answers = await _await_all([_answer(subscriber) for subscriber in subscribers])
                await send_body(send, 200, reply.whole(answers))
                _leave(subscribers, has_answer=True)
        finally:
            watcher.cancel()
            _leave(subscribers)

    async def _open_turns(self, data: bytes, scope: Scope) -> tuple[ParsedRequest, list[Subscriber]]:
        parsed = await _read_request(data, scope, self._dialect, self._find_session)
        turns = parsed.turns
        session = parsed.session
        requests = parsed.requests
        for kind, number in parsed.num_left_out.items():
            turns.counters[f"left_out.{kind}"] += number

        def recheck() -> None:
            """Raises ApiError if the session has ended meanwhile."""
            is_ad_hoc = scope["caller"].named_session is None
            if is_ad_hoc or turns.includes(session):
                return
            # raises if no session of this id is left; else the session belongs to a restarted run
            self._find_session(scope, get_field(parsed.body, "model", (str,), ""))
            raise restarted()

        try:
            if requests[0].left_out.images:
                await _store_images(requests[0], turns)
                recheck()
            fingerprint = await in_thread_if(
                parsed.is_large, RequestFingerprint.from_request, scope["headers"], data
            )
            subscribers = await open_turns(
                turns, session, requests, fingerprint, is_large=parsed.is_large, recheck=recheck
            )
            return parsed, subscribers
        except ContextOverflow as error:
            await turns.note_overflow(session)
            raise error.reword(*self._dialect.overflow) from None


class TokenCountEndpoint:
    """The endpoint that counts the tokens of a prompt without beginning a turn."""

    def __init__(self, dialect: Dialect, field: str, find_session: FindSession) -> None:
        """`field` of the response holds the number."""
        self._dialect = dialect
        self._field = field
        self._find_session = find_session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = await read_body(receive, MAX_BYTES_WITH_IMAGES)
        # a dialect may require max_tokens, which a request to count tokens does not have
        defaults = {"max_tokens": 1}
        parsed = await _read_request(data, scope, self._dialect, self._find_session, defaults)
        await _store_images(parsed.requests[0], parsed.turns)
        is_long = len(data) > SMALL_CHARACTERS
        try:
            num_tokens = await in_thread_if(is_long, count_tokens, parsed.turns.renderer, parsed.requests[0])
        except ContextOverflow as error:
            raise error.reword(*self._dialect.overflow) from None
        finally:
            trim_memory_after(len(data))
        await send_body(send, 200, orjson.dumps({self._field: num_tokens}))


class ParsedRequest(NamedTuple):
    """A parsed request, with its run and its session."""

    body: Body
    """The fields of the body, without the prompt."""
    turns: LiveTurns
    session: Session
    requests: list[TurnRequest]
    """One per prompt."""
    num_left_out: Mapping[str, int]
    """Numbers of changed or omitted parts, by kind."""
    is_large: bool
    """Whether the request is handled in threads."""


async def _read_request(
    data: bytes, scope: Scope, dialect: Dialect, find_session: FindSession, defaults: Body | None = None
) -> ParsedRequest:
    """Raises ApiError also for unsupported fields, and for parts that are not text if the run refuses them.
    `defaults`: values of fields that the body may lack."""
    is_large = is_large_body(data)
    body, was_repaired = await in_thread_if(is_large, _parse_body, data, scope, dialect, defaults or {})
    turns, session = find_session(scope, get_field(body, "model", (str,), ""))
    if turns.renderer.image_processor is None:
        _check_size(len(data))
    return await in_thread_if(
        is_large, _parse_for_run, data, body, dialect, turns, session, was_repaired, is_large
    )


def _parse_body(data: bytes, scope: Scope, dialect: Dialect, defaults: Body) -> tuple[Body, bool]:
    """The body, and whether characters in it were mended."""
    sent, was_repaired = parse_object(data, dialect.has_ids)
    return dialect.read(defaults | sent, scope["path"]), was_repaired


def _parse_for_run(
    data: bytes,
    body: Body,
    dialect: Dialect,
    turns: LiveTurns,
    session: Session,
    was_repaired: bool,
    is_large: bool,
) -> ParsedRequest:
    settings = turns.spec.rollout
    is_multimodal = turns.renderer.image_processor is not None
    supported = dialect.done_fields
    if turns.spec.follows_grammars:
        supported |= dialect.schema_fields
    body = refuse_unsupported_fields(body, settings.ignored_fields, supported)
    body = normalise(body, settings.normalised)
    requests = dialect.parse(body, session, is_multimodal)
    left_out = requests[0].left_out
    unseen = left_out.unseen
    if unseen and settings.unseen_parts == "refuse":
        raise WrongField(
            unseen[0],
            f"{unseen[0]} has a part that is not text; only text is supported. Set rollout.unseen_parts to "
            "`replace`: a short text then replaces such parts.",
        )
    _check_size(len(data) - sum(len(image.data) for image in left_out.images))
    if len(data) > MAX_TOOLS_BYTES:
        check_size(requests[0].tools, "tools", MAX_TOOLS_BYTES)
    kinds = [*left_out.kinds]
    if was_repaired:
        kinds.append(CHARACTERS)
    placeholder = turns.renderer.placeholder
    if placeholder is not None and any(
        placeholder.is_in(text) for request in requests for text in request.texts()
    ):
        kinds.append(PLACEHOLDERS)
    if has_strict_tool(body):
        kinds.append("strict")
    _, prompt_field = dialect.overflow
    without_prompt = {name: value for name, value in body.items() if name != prompt_field}
    return ParsedRequest(without_prompt, turns, session, requests, Counter(kinds) if kinds else {}, is_large)


async def _store_images(request: TurnRequest, turns: LiveTurns) -> None:
    """Have the images of a request made and stored. Raises ApiError if one cannot be shown or stored."""
    image_processor = turns.renderer.image_processor
    images = request.left_out.images
    if image_processor is None or not images:
        return
    if len(images) >= turns.spec.context_length:
        # each image has at least one token, so decoding can be spared
        raise ContextOverflow(len(images), turns.spec.context_length)
    await turns.media.complete(images, image_processor.with_max_tokens(turns.spec.rollout.max_picture_tokens))
    images.clear()


def restarted() -> ApiError:
    sentence = "The run was started again while this request was read: send the request again."
    return ApiError(503, sentence, retry_after_s=RETRY_AFTER_S)


def _check_size(size: int, limit: int = MAX_BODY_BYTES) -> None:
    if size > limit:
        raise ApiError(413, f"The request body is over the limit of {limit} bytes.")


async def read_body(receive: Receive, limit: int = MAX_BODY_BYTES) -> bytes:
    """Raises ApiError 413 for a body of more bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ApiError(400, "The client went away before its request was read.")
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        _check_size(size, limit)
        if not event.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def send_body(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _leave_when_gone(receive: Receive, subscribers: list[Subscriber]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    _leave(subscribers)


def _leave(subscribers: list[Subscriber], has_answer: bool = False) -> None:
    for subscriber in subscribers:
        subscriber.leave(has_answer)


async def _answer(subscriber: Subscriber) -> Answer:
    async for _ in subscriber.pieces():
        pass
    return subscriber.turn.answer()


async def _stream(subscribers: list[Subscriber], reply: Reply, send: Send, request_id: str) -> None:
    for subscriber in subscribers:
        subscriber.turn.check()
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would gather events otherwise
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def forward(data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})

    await forward(reply.start(subscribers[0].turn.num_prompt_tokens))
    try:
        answers = await _await_all(
            _forward_turn(subscriber, functools.partial(reply.piece, i), forward)
            for i, subscriber in enumerate(subscribers)
        )
    except ApiError as error:
        # the status line is sent, so only the stream itself can report the error
        return await forward(reply.fail(error, request_id), more=False)
    ends = b"".join(reply.end_turn(i, answer) for i, answer in enumerate(answers))
    await forward(ends + reply.end(answers), more=False)
    _leave(subscribers, has_answer=True)


async def _forward_turn(
    subscriber: Subscriber, piece: Callable[[Any], bytes], forward: Callable[[bytes], Awaitable[None]]
) -> Answer:
    async for pieces in subscriber.pieces():
        if data := piece(pieces):
            await forward(data)
    return subscriber.turn.answer()


async def _await_all(turns: Iterable[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """All answers, or the first error, after which the other turns are not awaited."""
    first, *others = turns
    if not others:
        return [await first]
    tasks = [asyncio.ensure_future(turn) for turn in (first, *others)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
