"""Invariant 5 with a real model: interrupted anywhere, on any engine, the same tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.routing.wait_queue import MAX_FAULTS
from sf_core.engines.torch.torch_engine import TorchEngine
from sf_core.testing.engines import awake, drain
from sf_core.types import FinishReason, GenerationRequest, Sampling, WeightsRef
from tests import bench
from tests.bench import closeness
from tests.bench.dataplane import router

CONTEXT = 64


def torch_engines(folder: str) -> router.MakeEngine:
    return lambda: TorchEngine(folder, max_running=3, context_length=CONTEXT)


def undisturbed(folder: str, request: GenerationRequest) -> tuple[list[int], list[float], FinishReason]:
    engine = torch_engines(folder)()
    awake(engine, WeightsRef(0, folder))
    engine.submit(request)
    chunks = drain(engine)
    assert chunks[-1].finish_reason is not None
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    return token_ids, [p for chunk in chunks for p in chunk.logprobs], chunks[-1].finish_reason


turns = st.tuples(
    st.lists(st.integers(0, 59), min_size=1, max_size=12),
    st.integers(1, 24),
    st.sampled_from([0.0, 0.0, 1.0]),
    st.sampled_from([((), ""), ((7, 11), ""), ((bench.engines.model_folders.STOP,), "start: /[a-z]{3,30}/")]),
    st.booleans(),
)


@settings(
    max_examples=bench.properties.examples(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    asked=st.lists(turns, min_size=1, max_size=4),
    events=st.lists(
        st.tuples(
            st.sampled_from(["act"] * 6 + ["die", "evacuate", "freeze", "abort_one"]), st.integers(0, 1)
        ),
        max_size=40,
    ),
)
async def test_interrupted_generations_are_token_identical_to_undisturbed_ones(
    model_folders: bench.engines.model_folders.ModelFolders,
    one_thread: None,
    asked: list[tuple[Any, ...]],
    events: list[tuple[str, int]],
) -> None:
    folder = model_folders()
    cluster = router.Cluster(weights=folder)
    engines = [await cluster.serving(torch_engines(folder), max_running=3) for _ in range(2)]
    generations = [
        cluster.ask(
            prompt,
            budget,
            stop=stop,
            stream=stream,
            sampling=Sampling(temperature=temperature, seed=i),
            grammar=grammar,
        )
        for i, (prompt, budget, temperature, (stop, grammar), stream) in enumerate(asked)
    ]
    requests = [generation.remaining_request(0) for generation in generations]
    for event, index in events:
        await cluster.dispatched()
        engine = engines[index]
        match event:
            case "act":
                engine.act()
            case "die":
                engine.die()
                engines[index] = await cluster.serving(torch_engines(folder), max_running=3)
            case "evacuate" | "freeze":
                pausing = asyncio.ensure_future(
                    cluster.router.pause(event, engine.connection.engine_id)  # type: ignore[arg-type]
                )
                await cluster.dispatched()
                engine.act()
                await pausing
                cluster.router.resume(engine.connection.engine_id)
            case "abort_one":
                # an engine may give back what it cannot go on with
                for request_id in list(engine.connection.in_flight)[:1]:
                    engine.abort([request_id])
    await cluster.run()
    for generation, request in zip(generations, requests, strict=True):
        if generation.num_faults >= MAX_FAULTS:
            # it is refused, because it was the only suspect of each of these deaths (test_suspects.py)
            assert not generation.token_ids
            continue
        token_ids, logprobs, reason = undisturbed(folder, request)
        assert generation.token_ids.tolist() == token_ids
        assert generation.finish_reason == reason
        closeness.assert_rounded(
            generation.logprobs, logprobs, closeness.FORWARD, scale=np.abs([1.0, *logprobs]).max()
        )
