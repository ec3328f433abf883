"""Test bench of the data plane: a served app, engines in threads, and canned answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
import uvicorn.server
from msgspec.structs import replace
from openai import OpenAI
from starlette.applications import Starlette
from websockets.sync.client import ClientConnection, connect

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.http_protocol import server_config
from sf_core.dataplane.operator_key import account_key, operator_key
from sf_core.dataplane.options import DataplaneOptions
from sf_core.engines.drivers.driver import HEARTBEAT_S
from sf_core.engines.drivers.serve import serve_engine
from sf_core.engines.protocol import Engine
from sf_core.engines.scripted import ScriptedEngine
from sf_core.engines.wire import Hello
from sf_core.types import Chunk, GenerationRequest
from tests.bench.dataplane.specs import SPEC, changed, make_tool
from tests.bench.forks import Fork
from tests.bench.waits import join, patience, wait_until


class _Quick:
    """asyncio for uvicorn, which looks for its end and for that of its connections every 0.1 s."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


uvicorn.server.asyncio = _Quick()  # type: ignore[attr-defined]

Script = Callable[[list[int], int], list[int]]
PRELOADED = (
    "sf_core.cli.main",
    "sf_core.dataplane.server",
    "uvicorn.loops.uvloop",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.websockets.websockets_sansio_impl",
)
"""Modules that `sf dataplane` needs."""

BUDGET = 300
"""Most tokens of a turn in `converse`."""


class EngineKilledError(BaseException):
    """Ends an engine in the middle of its work; its connection drops."""


class RecordingEngine(ScriptedEngine):
    """Keeps its requests, so that tests can compare ids bit for bit."""

    def __init__(self, script: Script, asked: list[GenerationRequest], **options: Any) -> None:
        super().__init__(script, **options)
        self.asked = asked
        self.without_token: set[str] = set()
        """Ids of requests here that have got no token from this engine."""
        self.proven: dict[str, float] = {}
        """Monotonic time at which requests last got a token."""
        self.died_at = math.inf

    killed = False
    steps_left: int | None = None
    """Steps in which it still samples before it holds; None: it never holds."""

    def submit(self, request: GenerationRequest) -> None:
        self.asked.append(request)
        super().submit(request)
        self.without_token.add(request.request_id)

    def step(self) -> list[Chunk]:
        if self.killed:
            self.died_at = time.monotonic()
            raise EngineKilledError
        time.sleep(0.0005)  # a real engine gives the machine away too
        if self.steps_left == 0:
            return []
        if self.steps_left is not None:
            self.steps_left -= 1
        chunks = super().step()
        proven = [chunk.request_id for chunk in chunks if chunk.token_ids]
        self.proven |= dict.fromkeys(proven, time.monotonic())
        self.without_token.difference_update(proven)
        return chunks

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        chunks = super().abort(request_ids)
        if self.died_at == math.inf:
            self.without_token.difference_update(chunk.request_id for chunk in chunks)
        return chunks


@dataclass
class ServedPlane:
    """A data plane in a thread, the HTTP client of its operator, and engines in threads."""

    url: str
    http: httpx.Client
    run_dir: Path
    model_dir: str
    asked: list[GenerationRequest] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    engines: dict[str, RecordingEngine] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    """Keys of the sessions that were claimed, which runners give to their agents."""

    @functools.cached_property
    def client(self) -> ServedPlane:
        """The same data plane, for a client without a key."""
        return dataclasses.replace(self, http=httpx.Client(base_url=self.url, timeout=patience()))

    @property
    def key(self) -> str | None:
        """The operator's key."""
        return operator_key(self.url)

    def agent_key(self, session: str | None) -> str:
        """The key of the agent of a session, which its id or a path of it names: the session's if it was
        claimed, else a word that is no key."""
        session_id = (session or "").removeprefix("/sessions/").partition("/")[0]
        return self.keys.get(session_id, "none")

    def agent_headers(self, session: str | None) -> dict[str, str]:
        """Headers with `agent_key`."""
        return {"Authorization": f"Bearer {self.agent_key(session)}"}

    def register(self, **changes: Any) -> dict[str, Any]:
        spec = changed(
            SPEC,
            run_dir=str(self.run_dir / "run"),
            model_dir=self.model_dir,
            seed=7,
            temperature=0.9,
            top_p=0.95,
            top_k=5,
            max_tokens=32,
            context_length=2048,
            session_attempts=2,
            session_timeout_s=60.0,
            num_batches=100,
        )
        return self.post("/runs", changed(spec, **changes))

    def post(self, path: str, body: dict[str, Any] | None = None, key: str | None = None) -> dict[str, Any]:
        """The response to this body. The request shows the key of `http`, unless another is given."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        response = self.http.post(path, json=body or {}, headers=headers)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        response = self.http.get(path, params=params)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def connect(self, script: Script, lease: str = "r0", *, tokens_per_step: int = 1, **hello: Any) -> None:
        """Start an engine; returns when it serves."""
        greeting = replace(Hello("run", 1, lease, 0, lease, lease, 8), **hello)

        engine = RecordingEngine(script, self.asked, tokens_per_step=tokens_per_step)
        self.engines[lease] = engine
        self.lend(engine, greeting)

    def lend(self, engine: Engine, greeting: Hello) -> None:
        """Have an engine at rest serve; returns when it does."""
        lease = greeting.lease_id

        def serve() -> None:
            try:
                self.reasons[lease] = serve_engine(
                    self.url, self.key, greeting, engine, patience_s=patience()
                )
            except EngineKilledError:
                self.reasons[lease] = "killed"

        self.threads.append(threading.Thread(target=serve, daemon=True))
        self.threads[-1].start()
        wait_until(
            lambda: (
                any(engine["id"] == greeting.engine_id for engine in self.live_engines(greeting.run_id))
                or lease in self.reasons
            )
        )

    def dial(self) -> ClientConnection:
        """Socket of an engine that has not said hello."""
        url = self.url.replace("http", "ws", 1) + "/engines"
        return connect(url, additional_headers=operator_headers(self.url))

    def live_engines(self, run_id: str = "run") -> list[dict[str, Any]]:
        return [engine for engine in self.get(f"/runs/{run_id}")["engines"] if engine["version"] is not None]

    def claim(
        self, count: int = 1, runner: str = "a0", running: list[str] | None = None, run_id: str = "run"
    ) -> list[dict[str, Any]]:
        body = {"runner": runner, "max": count, "wait_s": 0.0, "running": running or []}
        return list(self.note_keys(self.post(f"/runs/{run_id}/claim", body))["sessions"])

    def note_keys(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer to a claim, whose keys the agents of its sessions then have."""
        self.keys |= {claim["session_id"]: claim["key"] for claim in answer["sessions"]}
        return answer


def operator_headers(url: str) -> dict[str, str]:
    """Headers with the operator's key."""
    return {"Authorization": f"Bearer {operator_key(url)}"}


def operator_client(url: str, key: str | None = None) -> httpx.Client:
    """A client that shows the operator's key, by default that of the account."""
    headers = operator_headers(url) if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, timeout=patience())


@contextlib.contextmanager
def attended(url: str, folder: Path, model_dir: str, key: str | None = None) -> Iterator[ServedPlane]:
    """ServedPlane of the data plane at this URL; at the end its run is released and its engines end."""
    with operator_client(url, key) as http:
        plane = ServedPlane(url, http, folder, model_dir)
        yield plane
        if http.get("/runs/run").status_code == 200:
            http.post("/runs/run/resume")
            http.post("/runs/run/release")
        for thread in plane.threads:
            join(thread)
        plane.client.http.close()


@contextlib.contextmanager
def running_app(
    heartbeat_s: float = HEARTBEAT_S, port: int = 0, key: str | None = None, **options: Any
) -> Iterator[str]:
    """Serve the app with these DataplaneOptions from a thread; yields its URL. Without a key, the app takes
    that of the account, as `sf dataplane` does."""
    given = DataplaneOptions(**options)
    app = make_app(key or account_key(), given, welcomes_strangers=key is None)
    with serving(app, heartbeat_s, port, given) as url:
        yield url


@contextlib.contextmanager
def serving(
    app: Starlette,
    heartbeat_s: float = HEARTBEAT_S,
    port: int = 0,
    options: DataplaneOptions | None = None,
) -> Iterator[str]:
    """Serve this app from a thread; yields its URL."""
    config = server_config(app, options)
    config.port = port
    config.ws_ping_interval = config.ws_ping_timeout = heartbeat_s
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        join(thread)


@contextlib.contextmanager
def running_process(port_file: Path, port: int, *options: str, module: str = "sf_core") -> Iterator[str]:
    """Serve from a process of its own, which is killed at the end; yields its URL."""
    port_file.unlink(missing_ok=True)
    words = ("dataplane", "--port", str(port), "--port-file", str(port_file), *options)
    with Fork(PRELOADED, module, *words) as process:
        try:
            wait_until(port_file.exists)
            yield f"http://127.0.0.1:{port_file.read_text(encoding='utf-8')}"
        finally:
            process.kill()


def say(renderer: Renderer, text: str) -> list[int]:
    """Ids of an answer, with its end of turn."""
    return [*renderer.encode(text).tolist(), renderer.stop_token_ids[0]]


def answering(renderer: Renderer, *texts: str) -> Script:
    """A script that gives these answers in turn and repeats the last one."""
    answers = [say(renderer, text) for text in texts]
    return lambda prompt, seed: answers.pop(0) if len(answers) > 1 else answers[0]


def tool_call_text(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'calc', 'arguments': arguments})}\n</tool_call>"


CALC = make_tool("calc", "Evaluates.", expression="string")


def converse(plane: ServedPlane, claim: dict[str, Any], num_turns: int, streamed: bool) -> list[str]:
    """Answers to an agent that knows nothing of restarts, but repeats a broken stream, which no SDK does."""
    messages: Any = []
    answers = []
    base_url = f"{plane.url}/sessions/{claim['session_id']}/v1"
    with OpenAI(base_url=base_url, api_key=claim["key"], max_retries=20, timeout=patience()) as agent:
        for turn in range(num_turns):
            messages.append({"role": "user", "content": f"{turn}?"})
            answers.append(ask_stream(agent, messages) if streamed else ask(agent, messages))
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def ask(agent: OpenAI, messages: Any) -> str:
    answer = agent.chat.completions.create(model="policy", messages=messages, max_tokens=BUDGET)
    return answer.choices[0].message.content or ""


def ask_stream(agent: OpenAI, messages: Any) -> str:
    seen = ""
    while True:
        text = ""
        try:
            for chunk in agent.chat.completions.create(
                model="policy", messages=messages, max_tokens=BUDGET, stream=True
            ):
                text += chunk.choices[0].delta.content or ""
                seen = max(seen, text, key=len)
            assert text.startswith(seen), "the answer begins with all that was seen of it before it broke"
            return text
        except openai.APIStatusError:
            raise
        except (httpx.TransportError, openai.APIError):  # of a stream that broke off, or says why it ends
            continue


def finish(plane: ServedPlane, claim: dict[str, Any]) -> None:
    report = {"status": "finished", "reward": 1.0, "task_id": "t", "environment": "test"}
    plane.post(f"/sessions/{claim['session_id']}/finish", report)
