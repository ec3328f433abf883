"""Calls one judge over the OpenAI API. A question is repeated while the judge does not answer or gives no
verdict, and not asked again if its reply is known.

A reply is a verdict if it ended by itself, with an answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import httpx
import msgspec
import orjson

from sf_core.config.rollout_config import JudgeConfig
from sf_core.dataplane.chat.answer_parser import THINK_END, THINK_START
from sf_core.dataplane.control.client import refusal_of
from sf_core.types import Endpoint
from storage.tables.judgements import Judgement

WHY_NONE = {
    "length": "the reply was cut off: raise environment.judges.{name}.max_tokens, or the server's own limit",
    "content_filter": "a content filter of the server cut off the reply",
    "refusal": "the judge refused to answer",
    "tool_calls": "the reply calls a tool",
    "reasoning": "the reply has reasoning and no answer",
    "empty": "the reply is empty",
    "other": "the server does not say that the reply ended by itself (`finish_reason` is not `stop`)",
}
"""Why replies are no verdicts: the reasons as they are counted, each with a sentence for errors."""


class Said(NamedTuple):
    text: str
    """The answer of a reply, without reasoning."""
    fault: str
    """The key of WHY_NONE if the reply is no verdict; else empty."""


def read_reply(choice: Mapping[str, Any], first_token: str | None = None) -> Said:
    """Read a choice of a chat completion. `first_token` is given if only the first token of the reply was
    asked for: such a reply may end with `length`. Raises LookupError, TypeError or AttributeError if this is
    no choice."""
    message = choice["message"]
    end = choice.get("finish_reason")
    content = _join(message.get("content"))
    _, mark, answer = content.partition(THINK_END)
    text = answer.lstrip() if mark else content
    is_thinking = not mark and (content or first_token or "").lstrip().startswith(THINK_START)
    if end == "content_filter":
        return Said(text, "content_filter")
    if message.get("refusal"):
        return Said(text, "refusal")
    if end in ("tool_calls", "function_call") or message.get("tool_calls") or message.get("function_call"):
        return Said(text, "tool_calls")
    if end == "length" and first_token is None:
        return Said(text, "length")
    if end not in ("stop", "length"):
        return Said(text, "other")
    reasons = is_thinking or mark or message.get("reasoning_content") or message.get("reasoning")
    # the one token that was asked for may be white space, and the log-probs beside it are an answer
    is_space = end == "length" and bool(text and first_token and not first_token.strip() and not reasons)
    if is_thinking or not (text.strip() or is_space):
        return Said(text, "reasoning" if reasons else "empty")
    return Said(text, "")


def _join(content: Any) -> str:
    """The text of a message's content; some servers write a list of parts."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(str(part["text"]) for part in content if part.get("type") == "text")


TRIES = 4
"""Most calls for one reply. Then the answer is scored again later (phases.py), perhaps by another worker."""

FIRST_PAUSE_S = 0.25
"""Seconds before the second call; each further pause is twice as long."""

NOT_NOW = {408, 429, *range(500, 600)}
"""Statuses with which a judge says that it may answer later."""

MAX_KNOWN = 2**14
"""Replies that are kept for equal questions."""

Messages = Sequence[Mapping[str, Any]]


class RefusedError(Exception):
    """A judge refuses a question, and would again."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a question."""

    judgement: Judgement
    """The question and its reply; the verdict is not read yet."""
    likely: Mapping[str, float] = field(default_factory=dict)
    """Log-probs of the most likely first tokens, if they were asked for."""
    error: str = ""
    """Why no verdict came."""


class JudgeClient:
    """Must be opened before it is asked."""

    def __init__(self, name: str, settings: JudgeConfig, endpoint: Endpoint) -> None:
        self.name = name
        self.endpoint = endpoint
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._cache: dict[bytes, Reply] = {}
        self._asking: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Locks of the questions that are being asked: equal ones wait for the reply."""

    def open(self) -> None:
        key = self.endpoint.api_key
        limits = httpx.Limits(max_connections=self._settings.concurrency)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # the time is bounded with that of all parts of a call
        self._http = httpx.AsyncClient(
            base_url=self.endpoint.base_url, headers=headers, timeout=None, limits=limits
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, messages: Messages, anew: bool = False, **options: Any) -> Reply:
        """The judge's reply to these messages; `options` are further fields of the request. At temperature 0
        an equal question has the reply of the first, unless it is asked `anew`. Raises RefusedError."""
        settings = self._settings
        limit = {} if settings.max_tokens is None else {"max_tokens": settings.max_tokens}
        question = {"temperature": settings.temperature, **limit, **options, "messages": messages}
        if settings.temperature > 0:
            return await self._call(question)
        digest = hashlib.sha256(orjson.dumps([self.name, question], option=orjson.OPT_SORT_KEYS)).digest()
        lock = self._asking.setdefault(digest, asyncio.Lock())
        async with lock:
            cached_reply = None if anew else self._cache.get(digest)
            if cached_reply is not None:
                nothing = {"tokens": 0, "seconds": 0.0, "attempts": 0, "discarded": []}
                judgement = msgspec.structs.replace(cached_reply.judgement, cached=True, **nothing)
                return replace(cached_reply, judgement=judgement)
            reply = await self._call(question)
            if reply.judgement.reply is not None:
                self._cache[digest] = reply
                if len(self._cache) > MAX_KNOWN:
                    del self._cache[next(iter(self._cache))]
            return reply

    async def _call(self, question: dict[str, Any]) -> Reply:
        question_record = Judgement(judge=self.name, messages=orjson.dumps(question["messages"]).decode())
        async with self._slots:
            started = time.monotonic()
            error = ""
            tokens = 0
            discarded: list[str] = []

            def judged(attempts: int, **outcome: Any) -> Judgement:
                seconds = time.monotonic() - started
                facts = {"tokens": tokens, "discarded": discarded, **outcome}
                return msgspec.structs.replace(question_record, seconds=seconds, attempts=attempts, **facts)

            for attempt in range(1, TRIES + 1):
                try:
                    async with asyncio.timeout(self._settings.timeout_s):
                        came = await self._post(question)
                    tokens += came.tokens
                    if not came.said.fault:
                        return Reply(judged(attempt, reply=came.said.text), came.likely)
                    discarded.append(came.said.fault)
                    error = f"gives no verdict: {WHY_NONE[came.said.fault].format(name=self.name)}"
                except TimeoutError:
                    error = f"does not answer: no reply within {self._settings.timeout_s:g} s"
                except (httpx.RequestError, _NotNowError) as raised:
                    error = f"does not answer: {str(raised) or type(raised).__name__}"
                if attempt < TRIES:
                    await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            where = f"judge {self.name} at {self.endpoint.base_url}"
            return Reply(judged(TRIES), error=f"{where} {error}")

    async def _post(self, question: dict[str, Any]) -> _Came:
        if not self.endpoint.model:
            listed = self._read(await self._http.get("models"))
            try:
                self.endpoint = replace(self.endpoint, model=str(listed["data"][0]["id"]))
            except (LookupError, TypeError):
                raise _NotNowError("the judge's server lists no model") from None
        body = orjson.dumps({"model": self.endpoint.model, **question})
        headers = {"Content-Type": "application/json"}
        answer = self._read(await self._http.post("chat/completions", content=body, headers=headers))
        try:
            choice = answer["choices"][0]
            first = ((choice.get("logprobs") or {}).get("content") or [{}])[0]
            likely = {
                str(candidate["token"]): float(candidate["logprob"])
                for candidate in first.get("top_logprobs") or ()
            }
            said = read_reply(choice, str(first.get("token", "")) if "logprobs" in question else None)
            tokens = int((answer.get("usage") or {}).get("total_tokens") or 0)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise _NotNowError("the judge's reply is not a chat completion") from None
        if not tokens and self._settings.max_tokens_per_iteration is not None:
            bound = f"environment.judges.{self.name}.max_tokens_per_iteration"
            raise RefusedError(
                f"the server of judge {self.name} does not report `usage`, so {bound} cannot be enforced"
            )
        return _Came(said, likely, tokens)

    def _read(self, response: httpx.Response) -> Any:
        """The JSON of a response. Raises RefusedError or _NotNowError."""
        if not response.is_success:
            # some servers tell the key that they refuse
            why = refusal_of(response).replace(self.endpoint.api_key or "\0", "its key")
            if response.status_code in NOT_NOW:
                raise _NotNowError(why)
            where = f"judge {self.name} at {self.endpoint.base_url}"
            raise RefusedError(f"{where} refused the request with status {response.status_code}: {why}")
        try:
            return orjson.loads(response.content)
        except orjson.JSONDecodeError:
            raise _NotNowError("the judge's reply is not JSON") from None


class _Came(NamedTuple):
    """What a call brought."""

    said: Said
    likely: dict[str, float]
    """Log-probs of the most likely first tokens of the reply."""
    tokens: int
    """Tokens of question and reply."""


class _NotNowError(Exception):
    """The call is to be repeated."""
