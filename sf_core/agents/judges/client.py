"""Calls one judge over the OpenAI API: again while it is away, and not again for what is known."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import httpx
import orjson

from sf_core.config.rollout_config import JudgeConfig
from sf_core.dataplane.control.client import refusal_of
from sf_core.types import Endpoint

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

    text: str | None
    """None: no reply came."""
    likely: Mapping[str, float]
    """Log-probs of the most likely first tokens, if they were asked for."""
    tokens: int
    """Tokens of question and reply."""
    seconds: float
    attempts: int
    cached: bool = False
    error: str = ""
    """Why no reply came."""
    question: bytes = b""
    """Digest of the question that it is kept for."""


class JudgeClient:
    """Must be entered before it is asked."""

    def __init__(self, name: str, settings: JudgeConfig, endpoint: Endpoint) -> None:
        self.name, self.endpoint, self._settings = name, endpoint, settings
        self._places = asyncio.Semaphore(settings.concurrency)
        self._known: dict[bytes, Reply] = {}
        self._asking: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Locks of the questions that are being asked: equal ones wait for the reply."""

    async def __aenter__(self) -> JudgeClient:
        key = self.endpoint.api_key
        limits = httpx.Limits(max_connections=self._settings.concurrency)
        self._http = httpx.AsyncClient(
            base_url=self.endpoint.base_url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=self._settings.timeout_s,
            limits=limits,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, messages: Messages, anew: bool = False, **options: Any) -> Reply:
        """The judge's reply to these messages; `options` are further fields of the request. At temperature 0
        an equal question has the reply of the first, unless it is asked `anew`. Raises RefusedError."""
        settings = self._settings
        question = {"temperature": settings.temperature, "max_tokens": settings.max_tokens, **options}
        question["messages"] = messages
        if settings.temperature > 0:
            return await self._call(question)
        digest = hashlib.sha256(orjson.dumps([self.name, question], option=orjson.OPT_SORT_KEYS)).digest()
        lock = self._asking.setdefault(digest, asyncio.Lock())
        async with lock:
            known = None if anew else self._known.get(digest)
            if known is not None:
                return replace(known, tokens=0, seconds=0.0, attempts=0, cached=True)
            reply = replace(await self._call(question), question=digest)
            if reply.text is not None:
                self._known[digest] = reply
                if len(self._known) > MAX_KNOWN:
                    del self._known[next(iter(self._known))]
            return reply

    def forget(self, reply: Reply) -> None:
        """Do not keep a reply that cannot be read."""
        self._known.pop(reply.question, None)

    async def _call(self, question: dict[str, Any]) -> Reply:
        async with self._places:
            started, pause, error = time.monotonic(), FIRST_PAUSE_S, ""
            for attempt in range(1, TRIES + 1):
                try:
                    async with asyncio.timeout(self._settings.timeout_s):
                        found = await self._post(question)
                    return replace(found, seconds=time.monotonic() - started, attempts=attempt)
                except TimeoutError:
                    error = f"no reply within {self._settings.timeout_s:g} s"
                except (httpx.RequestError, _NotNowError) as raised:
                    error = str(raised) or type(raised).__name__
                if attempt < TRIES:
                    await asyncio.sleep(pause)
                    pause *= 2
            said = f"judge {self.name} at {self.endpoint.base_url} does not answer: {error}"
            return Reply(None, {}, 0, time.monotonic() - started, TRIES, error=said)

    async def _post(self, question: dict[str, Any]) -> Reply:
        if not self.endpoint.model:
            listed = self._read(await self._http.get("models"))
            try:
                self.endpoint = replace(self.endpoint, model=str(listed["data"][0]["id"]))
            except (LookupError, TypeError):
                raise _NotNowError("it lists no model") from None
        body = orjson.dumps({"model": self.endpoint.model, **question})
        headers = {"Content-Type": "application/json"}
        answer = self._read(await self._http.post("chat/completions", content=body, headers=headers))
        try:
            choice = answer["choices"][0]
            text = str(choice["message"]["content"] or "")
            first = ((choice.get("logprobs") or {}).get("content") or [{}])[0]
            likely = {str(one["token"]): float(one["logprob"]) for one in first.get("top_logprobs") or ()}
            tokens = int((answer.get("usage") or {}).get("total_tokens") or 0)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise _NotNowError("what it sent is no chat completion") from None
        if not tokens and self._settings.max_tokens_per_iteration is not None:
            bound = f"environment.judges.{self.name}.max_tokens_per_iteration"
            raise RefusedError(f"judge {self.name} does not tell `usage`, so that {bound} cannot be held")
        return Reply(text, likely, tokens, 0.0, 0)

    def _read(self, response: httpx.Response) -> Any:
        """The JSON of a response. Raises RefusedError or _NotNowError."""
        if not response.is_success:
            # some servers tell the key that they refuse
            why = refusal_of(response).replace(self.endpoint.api_key or "\0", "its key")
            if response.status_code in NOT_NOW:
                raise _NotNowError(why)
            where = f"judge {self.name} at {self.endpoint.base_url}"
            raise RefusedError(f"{where} refuses with status {response.status_code}: {why}")
        try:
            return orjson.loads(response.content)
        except orjson.JSONDecodeError:
            raise _NotNowError("what it sent is no JSON") from None


class _NotNowError(Exception):
    """The call is to be repeated."""
