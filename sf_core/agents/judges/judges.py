"""The judges of a runner by their names, what a reward function gets of a judge, and the record of the
questions that it asked.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec
import orjson

from sf_core.agents.judges.client import JudgeClient, Messages, RefusedError, Reply
from sf_core.config.rollout_config import JudgeConfig
from sf_core.process.environment_variables import judge_key
from sf_core.settings import quote
from sf_core.types import Endpoint, NotJudged
from storage.tables.judgements import Judgement

MAX_LIKELY = 20
"""Log-probs of a reply's first token that are asked for: as many as servers give."""

UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What `read` raises of a reply that it cannot read."""


class Record:
    """What judges were asked while an answer, or the answers of a group, were scored."""

    def __init__(self) -> None:
        self.judgements: list[Judgement] = []
        self._loop = asyncio.get_running_loop()
        self._calls: set[Future[Any]] = set()
        """Calls of plain functions, which wait for them in their threads."""
        self.num_awaited = 0
        """Questions that are being asked, or were when the function that waited was given up."""
        self._is_over = False

    def drop_cached(self) -> None:
        """Forget questions whose replies were known: the answer is scored again, and they are asked again."""
        self.judgements = [judgement for judgement in self.judgements if not judgement.cached]

    def end(self) -> None:
        """End the calls of a function that was given up."""
        self._is_over = True
        for call in list(self._calls):
            call.cancel()

    def reach(self, asking: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call; where it is made on an event loop, what gives it when it is awaited."""
        if self._is_over:
            asking.close()
            raise NotJudged("the time limit for scoring the answer (rollout.score_timeout_s) is over")
        try:
            running_loop = asyncio.get_running_loop()
        except RuntimeError:
            running_loop = None
        if running_loop is self._loop:
            return asking
        call = asyncio.run_coroutine_threadsafe(asking, self._loop)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call.result() if running_loop is None else asyncio.wrap_future(call)


class Judge:
    """A judge of `environment.judges`. Its methods are awaited in an `async def`; in a plain function they
    block until the judge has answered. They raise NotJudged while it does not, or cannot be understood."""

    def __init__(self, client: JudgeClient, record: Record) -> None:
        self._client = client
        self._record = record

    @property
    def endpoint(self) -> Endpoint:
        """Where the judge is, for SDKs. What is asked there is not recorded. Without `name` in its settings
        the model is empty before the first reply."""
        return self._client.endpoint

    def ask(self, messages: str | Messages, item: str = "", read: Callable[[str], Any] | None = None) -> Any:
        """The judge's reply to messages, or to one of the user, as `read` reads it: it raises ValueError for
        what it cannot read, and is shown another reply then. `item` says in the record what was asked for."""
        return self._record.reach(
            self._ask(messages, item, lambda reply: (read or str)(str(reply.judgement.reply)))
        )

    def choose(self, messages: str | Messages, words: Sequence[str], item: str = "") -> Any:
        """The probabilities of words as the beginning of the reply, by the words, made to add up to 1. They
        come from the log-probs of the first token, so that nothing is parsed; words that begin with the same
        token cannot be told apart. Raises ValueError if one of them begins another."""
        folded = sorted(map(_fold, words))
        if not all(folded) or any(later.startswith(word) for word, later in pairwise(folded)):
            listed = ", ".join(map(quote, words))
            raise ValueError(
                f"the method choose cannot distinguish {listed}: a word is empty, or is the beginning of "
                "another word"
            )
        return self._record.reach(self._choose(messages, words, item))

    def prefer(self, question: str, a: str, b: str, item: str = "") -> Any:
        """Which of two texts is the better answer to a question: 1.0 if a is, 0.0 if b is. Asked in both
        orders, because judges prefer places; 0.5 if they disagree."""
        return self._record.reach(self._prefer(question, a, b, item))

    async def _prefer(self, question: str, a: str, b: str, item: str) -> float:
        pair = secrets.randbits(31)
        orders = [_compare(question, a, b), _compare(question, b, a)]
        asking = (self._choose(messages, "AB", item, pair) for messages in orders)
        # both are recorded, also if one fails
        results: list[Any] = await asyncio.gather(*asking, return_exceptions=True)
        for failure in results:
            if isinstance(failure, BaseException):
                raise failure
        # one order that cannot decide leaves it to the other
        gains = results[0]["A"] - results[0]["B"], results[1]["B"] - results[1]["A"]
        votes = sum((gain > 0) - (gain < 0) for gain in gains)
        return float(votes > 0) if votes else 0.5

    async def _choose(
        self, messages: str | Messages, words: Sequence[str], item: str, pair: int | None = None
    ) -> dict[str, float]:
        def understand(reply: Reply) -> dict[str, float]:
            if not reply.likely:
                raise RefusedError(f"judge {self._client.name} returns no log-probs, which `choose` needs")
            return weigh_words(reply.likely, words)

        options = {"max_tokens": 1, "logprobs": True, "top_logprobs": MAX_LIKELY}
        chosen: dict[str, float] = await self._ask(messages, item, understand, pair, **options)
        return chosen

    async def _ask(
        self,
        messages: str | Messages,
        item: str,
        understand: Callable[[Reply], Any],
        pair: int | None = None,
        **options: Any,
    ) -> Any:
        chat: Messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        for anew in (False, True):
            self._record.num_awaited += 1
            try:
                reply = await self._client.ask(chat, anew, **options)
            except asyncio.CancelledError:
                self._record.num_awaited += 1
                raise
            finally:
                self._record.num_awaited -= 1
            value = None
            judgement = reply.judgement
            error = reply.error
            if judgement.reply is not None:
                try:
                    value = understand(reply)
                    verdict = orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
                    judgement = msgspec.structs.replace(judgement, verdict=verdict)
                except UNREADABLE as raised:
                    problem = f"{quote(judgement.reply)} ({type(raised).__name__}: {raised})"
                    error = f"the reply of judge {self._client.name} cannot be read: {problem}"
                    if judgement.cached:
                        continue
            self._record.judgements.append(msgspec.structs.replace(judgement, item=item, pair=pair))
            if not error:
                return value
            if judgement.reply is None:
                break
        raise NotJudged(error)


def weigh_words(likely: Mapping[str, float], words: Sequence[str]) -> dict[str, float]:
    """Probabilities of words, by the log-probs of tokens that one of them begins with. Raises ValueError if
    there are none, or most probability is that of tokens with which several begin."""
    weights = dict.fromkeys(words, 0.0)
    shared = 0.0
    for token, logprob in likely.items():
        start = _fold(token)
        begun = [word for word in words if start and _fold(word).startswith(start)]
        if len(begun) == 1:
            weights[begun[0]] += math.exp(logprob)
        elif begun:
            shared += math.exp(logprob)
    total = sum(weights.values())
    if shared > total:
        raise ValueError(
            "the first token of the judge's reply is probably the beginning of several of the words "
            f"{', '.join(words)}, so the words cannot be distinguished"
        )
    if not total:
        raise ValueError(
            f"none of the {len(likely)} most likely tokens of the reply begins one of the words "
            f"{', '.join(words)}"
        )
    return {word: weight / total for word, weight in weights.items()}


def _fold(word: str) -> str:
    return word.strip().casefold()


def _compare(question: str, first: str, second: str) -> str:
    return (
        f"{question}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\n"
        "Which answer is better? Reply with A or B and nothing else."
    )


class Judges:
    """Must be entered before one of them is asked."""

    def __init__(self, settings: Mapping[str, JudgeConfig], endpoints: Mapping[str, Endpoint]) -> None:
        """`endpoints` says where each judge is; an empty model is that which the server lists first."""
        self._clients = {
            name: JudgeClient(name, config, endpoints[name]) for name, config in settings.items()
        }

    async def __aenter__(self) -> Judges:
        for client in self._clients.values():
            client.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.close()

    @contextmanager
    def record(self) -> Iterator[tuple[Mapping[str, Judge], Record]]:
        """The judges for the scoring of one answer, or of a group's, and what is recorded of it."""
        record = Record()
        try:
            yield _Named({name: Judge(client, record) for name, client in self._clients.items()}), record
        finally:
            record.end()


class _Named(dict[str, Judge]):
    def __missing__(self, name: str) -> Judge:
        raise ValueError(f"unknown judge {quote(name)}; use one of {', '.join(self)} (environment.judges)")


def endpoint_of(name: str, settings: JudgeConfig) -> Endpoint:
    """Where a judge with a `url` is. Its key is in the environment (SF_JUDGE_KEY_NAME), never in files."""
    assert settings.url is not None
    return Endpoint(settings.url, judge_key(name), settings.name or "")


def takes_judges(function: Callable[..., Any]) -> bool:
    """Whether a reward function is given the judges, as its parameter `judges`."""
    try:
        return "judges" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in another language
        return False
