"""Whatever a generation asks for, an engine at the other end of a real socket is asked for."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.operator_key import account_key
from sf_core.dataplane.routing.generation import Generation
from sf_core.engines.scripted import ScriptedEngine
from sf_core.engines.wire import Hello
from sf_core.types import Chunk, FinishReason, GenerationRequest, ImageSpan
from tests.bench.dataplane import planes
from tests.bench.properties import examples
from tests.bench.waits import wait_until

NUM_IDS = 258
"""Ids of the tokenizer of these tests."""


class Keeping(ScriptedEngine):
    """Keeps every request and answers it with one token."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, seed: [7], max_running=8)
        self.asked: list[GenerationRequest] = []
        self._ended: list[Chunk] = []

    @property
    def num_requests(self) -> int:
        return len(self._ended)

    def submit(self, request: GenerationRequest) -> None:
        self.asked.append(request)
        self._ended.append(Chunk(request.request_id, [7], [-1.0], 0, FinishReason.STOP))

    def step(self) -> list[Chunk]:
        ended = self._ended
        self._ended = []
        return super().step() + ended


class Stand:
    """A served run, an engine of it behind a socket, and generations that are given to its router."""

    def __init__(self, plane: planes.ServedPlane, engine: Keeping, generations: list[Generation]) -> None:
        self._server = plane
        self._engine = engine
        self._generations = generations

    def ask(self, generation: Generation) -> GenerationRequest:
        """What the engine is asked for this generation."""
        self._engine.asked.clear()
        self._generations.append(generation)
        assert self._server.http.post("/ask").status_code == 200
        wait_until(lambda: bool(self._engine.asked))
        [asked] = self._engine.asked
        return asked


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Iterator[Stand]:
    app = make_app(account_key())
    folder = Path(tmp_path_factory.mktemp("run"))
    generations: list[Generation] = []

    async def ask(_: Request) -> Response:
        app.state.plane.runs["run"].router.submit(generations.pop())
        return Response()

    app.router.routes.append(Route("/ask", ask, methods=["POST"]))
    with planes.serving(app) as url, planes.attended(url, folder, model_dir) as plane:
        plane.register()
        engine = Keeping()
        plane.lend(engine, Hello("run", 1, "r0", 0, "r0", "r0", 8))
        yield Stand(plane, engine, generations)


LIMITED: dict[str, st.SearchStrategy[Any]] = {
    "request_id": st.uuids().map(str),
    "prompt_ids": st.lists(st.integers(0, NUM_IDS - 1), min_size=1, max_size=50).map(
        lambda ids: array("i", ids)
    ),
    "position": st.just(0),
    "max_tokens": st.integers(5, 2**31 - 1),
    "seed": st.integers(0, 2**64 - 1),
}
"""Fields that cannot have every value of their type."""

INTEGERS = st.integers(-(2**31), 2**31 - 1)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: INTEGERS,
    tuple[int, ...]: st.lists(INTEGERS, max_size=4).map(tuple),
    float: st.floats(allow_nan=False),
    # no surrogates: text that is sent is UTF-8
    str: st.text(st.characters(codec="utf-8")),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type; of a struct, any of every field, whatever fields it has."""
    if kind in VALUES:
        return VALUES[kind]
    if kind == tuple[ImageSpan, ...]:
        return st.lists(values_of(ImageSpan), max_size=3).map(tuple)
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return st.from_type(kind)
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: values_of_field(name, hints[name]) for name in kind.__struct_fields__})


def values_of_field(name: str, kind: Any) -> st.SearchStrategy[Any]:
    return LIMITED[name] if name in LIMITED else values_of(kind)


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(request=values_of(GenerationRequest), sampled=st.lists(st.integers(0, NUM_IDS - 1), max_size=4))
def test_every_field_of_a_request_reaches_the_engine(
    stand: Stand, request: GenerationRequest, sampled: list[int]
) -> None:
    """Also after an interruption, when some tokens are sampled."""
    generation = Generation(request, floor=0)
    if sampled:
        logprobs = [-1.0] * len(sampled)
        generation.append(Chunk(request.request_id, sampled, logprobs, 0, FinishReason.ABORT), "e0")
    prompt_ids = [*request.prompt_ids, *sampled]
    rest = {"position": len(sampled), "max_tokens": request.max_tokens - len(sampled)}
    assert stand.ask(generation) == replace(request, prompt_ids=prompt_ids, **rest)
