"""A teacher at a vLLM server: the log-probs that it gives to the tokens of rows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sf_core.engines.protocol import EngineLostError
from sf_core.engines.vllm.client import RequestRefusedError, VllmClient
from sf_core.process.environment_variables import teacher_key
from sf_core.waits import Wait, waiting_for

CONCURRENCY = 32
"""Rows that the server is asked about at once."""

_RETRY_DELAY_S = 1.0
"""Wait before a server that does not answer is asked again."""

_MIN_ATTEMPTS = 4
"""How often at least a server is asked that takes requests and never answers."""

_MINUS_INFINITY = -9999.0
"""The number that vLLM sends for minus infinity, which JSON does not have."""

Rows = Sequence[tuple[str, Sequence[int]]]
"""The name and the ids of each row."""

Logprobs = npt.NDArray[np.float32]


def ask_teacher(url: str, rows: Rows, timeout_s: float) -> list[Logprobs]:
    """Ask for the log-prob of every token of each row after those before it, at temperature 1 over the whole
    vocabulary; that of the first is 0. Every id must be one of the teacher's, because another one may end the
    server. A server that does not answer is asked again.

    Raises TimeoutError if nothing has come for `timeout_s`, or ValueError, which names the row, if the server
    refuses it or a number is not finite."""
    what = f"log-probs of {len(rows)} rows from the teacher at {url}"
    with waiting_for(what, timeout_s) as wait:
        return asyncio.run(_ask_all(url, rows, wait))


async def _ask_all(url: str, rows: Rows, wait: Wait) -> list[Logprobs]:
    client = VllmClient(url, key=teacher_key())
    slots = asyncio.Semaphore(CONCURRENCY)
    timeout_s = wait.timeout_s

    async def ask_until_answered(what: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                answer = await asyncio.wait_for(ask(), timeout_s / _MIN_ATTEMPTS)
                # every answer starts the timeout anew
                wait.timeout_s = wait.seconds + timeout_s
                wait.reason = ""
                return answer
            except RequestRefusedError as error:
                raise ValueError(f"the teacher at {url} refuses {what}: {error}") from None
            except (EngineLostError, TimeoutError) as error:
                wait.reason = str(error) or "it does not answer"
                wait.check()
                await asyncio.sleep(min(_RETRY_DELAY_S, wait.left_s))

    async def ask_about(name: str, ids: Sequence[int]) -> Logprobs:
        # vLLM samples one token after the prompt
        if max_tokens is not None and len(ids) >= max_tokens:
            raise ValueError(
                f"{name} has {len(ids):,} tokens, but the teacher at {url} takes at most {max_tokens - 1:,}: "
                f"start the teacher with --max-model-len={len(ids) + 1} or more, or lower "
                "engine.context_length"
            )
        async with slots:
            logprobs = await ask_until_answered(name, lambda: client.score(model, ids))
        return _to_array(logprobs, f"the teacher at {url} reports for {name}")

    try:
        model, max_tokens = await ask_until_answered("the request for its models", client.find_model)
        return await asyncio.gather(*(ask_about(name, ids) for name, ids in rows))
    finally:
        await client.close()


def _to_array(logprobs: Sequence[Any], source: str) -> Logprobs:
    # the first token follows nothing
    array = np.array([0.0, *logprobs[1:]], np.float32)
    wrong = np.flatnonzero(~np.isfinite(array) | (array <= _MINUS_INFINITY))
    if wrong.size:
        first = logprobs[wrong[0]]
        value = "minus infinity" if first == _MINUS_INFINITY else first
        raise ValueError(
            f"{source} that the log-prob of token {wrong[0]} is {value}, which cannot train the policy: "
            "check the weights of the teacher"
        )
    return array
