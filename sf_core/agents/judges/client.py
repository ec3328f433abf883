"""Calls one judge over the OpenAI API: again while it is away, and not again for what is known."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import httpx
import msgspec
import orjson

from sf_core.config.rollout_config import JudgeConfig
from sf_core.dataplane.control.client import refusal_of
from sf_core.types import Endpoint
from storage.tables.judgements import Judgement

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

    told: Judgement
    """The question and its reply; the verdict is not read yet."""
    likely: Mapping[str, float] = field(default_factory=dict)
    """Log-probs of the most likely first tokens, if they were asked for."""
    error: str = ""
    """Why no reply came."""


class JudgeClient:
    """Must be opened before it is asked."""

    def __init__(self, name: str, settings: JudgeConfig, endpoint: Endpoint) -> None:
        self.name, self.endpoint, self._settings = name, endpoint, settings
        self._places = asyncio.Semaphore(settings.concurrency)
        self._known: dict[bytes, Reply] = {}
        self._asking: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Locks of the questions that are being asked: equal ones wait for the reply."""

    def open(self) -> None:
        key, limits = self.endpoint.api_key, httpx.Limits(max_connections=self._settings.concurrency)
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
        question = {"temperature": settings.temperature, "max_tokens": settings.max_tokens, **options}
        question["messages"] = messages
        if settings.temperature > 0:
            return await self._call(question)
        digest = hashlib.sha256(orjson.dumps([self.name, question], option=orjson.OPT_SORT_KEYS)).digest()
        lock = self._asking.setdefault(digest, asyncio.Lock())
        async with lock:
            known = None if anew else self._known.get(digest)
            if known is not None:
                told = msgspec.structs.replace(known.told, tokens=0, seconds=0.0, attempts=0, cached=True)
                return replace(known, told=told)
            reply = await self._call(question)
            if reply.told.reply is not None:
                self._known[digest] = reply
                if len(self._known) > MAX_KNOWN:
                    del self._known[next(iter(self._known))]
            return reply

    async def _call(self, question: dict[str, Any]) -> Reply:
        asked = Judgement(judge=self.name, messages=orjson.dumps(question["messages"]).decode())
        async with self._places:
            started, error = time.monotonic(), ""

            def tell(attempts: int, **found: Any) -> Judgement:
                seconds = time.monotonic() - started
                return msgspec.structs.replace(asked, seconds=seconds, attempts=attempts, **found)

            for attempt in range(1, TRIES + 1):
                try:
                    async with asyncio.timeout(self._settings.timeout_s):
                        text, likely, tokens = await self._post(question)
                    return Reply(tell(attempt, reply=text, tokens=tokens), likely)
                except TimeoutError:
                    error = f"no reply within {self._settings.timeout_s:g} s"
                except (httpx.RequestError, _NotNowError) as raised:
                    error = str(raised) or type(raised).__name__
                if attempt < TRIES:
                    await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            where = f"judge {self.name} at {self.endpoint.base_url}"
            return Reply(tell(TRIES), error=f"{where} does not answer: {error}")

    async def _post(self, question: dict[str, Any]) -> tuple[str, dict[str, float], int]:
        """Text of the reply, log-probs of its first token, and tokens of both."""
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
            text = str(choice["message"]["content"] or "")
            first = ((choice.get("logprobs") or {}).get("content") or [{}])[0]
            likely = {str(one["token"]): float(one["logprob"]) for one in first.get("top_logprobs") or ()}
            tokens = int((answer.get("usage") or {}).get("total_tokens") or 0)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise _NotNowError("the judge's reply is not a chat completion") from None
        if not tokens and self._settings.max_tokens_per_iteration is not None:
            bound = f"environment.judges.{self.name}.max_tokens_per_iteration"
            raise RefusedError(
                f"the server of judge {self.name} does not report `usage`, so {bound} cannot be enforced"
            )
        return text, likely, tokens

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


class _NotNowError(Exception):
    """The call is to be repeated."""
