"""`endpoint.client()`: a key for each session, connections for each event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import certifi
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from sf_core.types import Endpoint
from tests.bench.properties import examples
from tests.bench.waits import patience

MANY = 1100
"""More than the 1,000 connections that the SDK allows a client by itself."""


@dataclass
class Model:
    """A model that answers with the key of the request."""

    url: str = ""
    connections: set[Any] = field(default_factory=set)
    num_held: int = 0
    """Requests that wait until there are so many."""
    _held: int = 0
    _is_full: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert request.transport is not None
        self.connections.add(request.transport.get_extra_info("peername"))
        self._held += 1
        if self._held >= self.num_held:
            self._is_full.set()
        await self._is_full.wait()
        key = request.headers["Authorization"].removeprefix("Bearer ")
        said = f"{key} {request.path.split('/')[2]} {asked['messages'][0]['content']}"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response(whole | {"choices": [choice]})

    def endpoint(self, session: str, key: str) -> Endpoint:
        return Endpoint(f"{self.url}/sessions/{session}/v1", key, "policy")


@asynccontextmanager
async def open_model() -> AsyncIterator[Model]:
    model = Model()
    app = web.Application()
    app.router.add_post("/sessions/{session}/v1/chat/completions", model.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        model.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield model
    finally:
        await runner.cleanup()


async def ask(client: Any, words: str) -> str:
    reply = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": words}]
    )
    return str(reply.choices[0].message.content)


def open_files() -> list[str]:
    """What this process has open."""
    gc.collect()
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(found)


SESSIONS = st.lists(
    st.tuples(
        st.text("abc-:._~", min_size=1, max_size=8),
        st.integers(1, 3),
        st.sampled_from(["closes", "closes twice", "leaves the block", "closes nothing", "fails"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=examples(40))
@given(SESSIONS)
async def test_the_client_of_a_session_has_the_key_of_no_other_whatever_others_close(
    sessions: list[tuple[str, int, str]],
) -> None:
    async def work(model: Model, number: int, key: str, num_requests: int, end: str) -> None:
        endpoint = model.endpoint(f"s{number}", f"{key}{number}")
        client = endpoint.client()
        if end == "leaves the block":
            async with client:
                pass
        for turn in range(num_requests):
            words = f"{number}.{turn}"
            assert await ask(client, words) == f"{key}{number} s{number} {words}"
            if end == "fails":
                raise ArithmeticError
        if end != "closes nothing":
            await client.close()
        if end == "closes twice":
            await client.close()

    async with open_model() as model:
        working = [work(model, number, *session) for number, session in enumerate(sessions)]
        outcomes = await asyncio.gather(*working, return_exceptions=True)
        for (_, _, end), outcome in zip(sessions, outcomes, strict=True):
            assert isinstance(outcome, ArithmeticError) if end == "fails" else outcome is None
        # as many as were in use at a time: nobody has closed those of others
        assert len(model.connections) <= len(sessions)
        assert await ask(model.endpoint("last", "k").client(), "?") == "k last ?"


def test_sessions_of_an_event_loop_share_its_connections_and_the_loop_closes_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> int:
        async with open_model() as model:
            for number in range(5):
                async with model.endpoint(f"s{number}", "key").client() as client:
                    await ask(client, "?")
            return len(model.connections)

    assert asyncio.run(run()) == 1  # libraries open what they keep
    before = open_files()
    assert asyncio.run(run()) == 1
    assert open_files() == before
    assert "Unclosed" not in caplog.text


def test_an_event_loop_that_is_closed_leaves_nothing_in_memory() -> None:
    async def run() -> weakref.ref[asyncio.AbstractEventLoop]:
        async with open_model() as model:
            await ask(model.endpoint("s", "key").client(), "?")
        return weakref.ref(asyncio.get_running_loop())

    loops = [asyncio.run(run()) for _ in range(3)]
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3


async def test_a_session_that_is_cancelled_takes_its_connection_and_no_other_with_it() -> None:
    async with asyncio.timeout(patience()):
        async with open_model() as model:
            model.num_held = 2
            asked = asyncio.create_task(ask(model.endpoint("a", "key").client(), "?"))
            while not model.connections:
                await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.wait([asked])
            assert await ask(model.endpoint("b", "other").client(), "!") == "other b !"


async def test_more_sessions_than_the_sdk_allows_connections_wait_for_answers_at_a_time() -> None:
    async with asyncio.timeout(patience()):
        async with open_model() as model:
            model.num_held = MANY
            client = model.endpoint("s", "key").client()
            await asyncio.gather(*(ask(client, "?") for _ in range(MANY)))
            assert len(model.connections) == MANY


async def test_a_client_waits_while_the_policy_trains_and_asks_again() -> None:
    client = Endpoint("http://127.0.0.1:9/v1", "key", "policy").client()
    assert (client.timeout, client.max_retries) == (None, 5)


async def test_a_plain_function_with_an_event_loop_of_its_own_has_connections_of_its_own() -> None:
    said = []
    async with open_model() as model:

        async def work(endpoint: Endpoint) -> str:
            return await ask(endpoint.client(), "?")

        def agent(number: int) -> None:
            said.append(asyncio.run(work(model.endpoint(f"s{number}", f"k{number}"))))

        threads = [threading.Thread(target=agent, args=[number]) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join, patience())
        assert len(model.connections) == 3
    assert sorted(said) == ["k0 s0 ?", "k1 s1 ?", "k2 s2 ?"]


def test_a_plain_function_without_an_event_loop_is_told_what_to_use() -> None:
    with pytest.raises(RuntimeError) as caught:
        Endpoint("http://127.0.0.1:9/v1", "key", "policy").client()
    assert str(caught.value) == (
        "endpoint.client() needs a running event loop: call it in an `async def` function, or use "
        "openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) in a plain function"
    )


def cpu_s(number: int, make: Any) -> float:
    """CPU time of so many event loops that make a client each."""

    async def once() -> None:
        make(Endpoint("http://127.0.0.1:9/v1", "key", "policy"))

    begun = time.process_time()
    for _ in range(number):
        asyncio.run(once())
    return time.process_time() - begun


def test_a_client_costs_less_than_a_new_one_even_in_an_event_loop_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    cpu_s(1, Endpoint.client)
    new = cpu_s(10, lambda endpoint: AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key))
    assert cpu_s(10, Endpoint.client) < new / 2
