"""A teacher at a vLLM server: what it says of given tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sf_core.engines.protocol import EngineLostError
from sf_core.engines.vllm.client import RequestRefusedError, VllmClient
from sf_core.surroundings import teacher_key
from sf_core.waits import Wait, waiting_for

CONCURRENCY = 32
"""Rows that the server is asked about at once."""

_PAUSE_S = 1.0
"""Wait before a server that does not answer is asked again."""

_TRIES = 4
"""How often at least a server is asked that takes requests and never answers."""

_IMPOSSIBLE = -9999.0
"""What vLLM says in the place of minus infinity, which JSON does not have."""

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
    patience_s = wait.timeout_s

    async def persist(what: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                found = await asyncio.wait_for(ask(), patience_s / _TRIES)
                # patience begins anew with every answer
                wait.timeout_s = wait.seconds + patience_s
                wait.reason = ""
                return found
            except RequestRefusedError as error:
                raise ValueError(f"the teacher at {url} refuses {what}: {error}") from None
            except (EngineLostError, TimeoutError) as error:
                wait.reason = str(error) or "it does not answer"
                wait.check()
                await asyncio.sleep(min(_PAUSE_S, wait.left_s))

    async def ask_about(name: str, ids: Sequence[int]) -> Logprobs:
        # it samples one token behind them
        if most is not None and len(ids) >= most:
            raise ValueError(
                f"{name} has {len(ids):,} tokens, but the teacher at {url} takes at most {most - 1:,}: "
                f"start the teacher with --max-model-len={len(ids) + 1} or more, or lower "
                "engine.context_length"
            )
        async with slots:
            told = await persist(name, lambda: client.score(model, ids))
        return _check(told, f"the teacher at {url} reports for {name}")

    try:
        model, most = await persist("the request for its models", client.find_model)
        return await asyncio.gather(*(ask_about(name, ids) for name, ids in rows))
    finally:
        await client.close()


def _check(told: Sequence[Any], saying: str) -> Logprobs:
    # the first token follows nothing
    found = np.array([0.0, *told[1:]], np.float32)
    wrong = np.flatnonzero(~np.isfinite(found) | (found <= _IMPOSSIBLE))
    if wrong.size:
        said = "minus infinity" if told[wrong[0]] == _IMPOSSIBLE else told[wrong[0]]
        raise ValueError(
            f"{saying} that the log-prob of token {wrong[0]} is {said}, which cannot train the policy: "
            "check the weights of the teacher"
        )
    return found
