"""However sampled tokens arrive, and however many share an event, a stream says the same."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.gateway.dialects.registry import find_dialect
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.routing.generation import StreamPace
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.runs.state import RunState
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.opening import open_turns
from sf_core.dataplane.turns.request import RequestFingerprint
from sf_core.types import Chunk, FinishReason
from tests.bench import dataplane
from tests.bench.properties import examples
from tests.bench.waits import patience

Event = dict[str, Any]
Said = dict[str, Any]

FUNCTION = dataplane.planes.CALC["function"]
HI = [{"role": "user", "content": "hi"}]
STOP = "the lazy"
GOOGLE = "/v1/models/policy:streamGenerateContent"

BODIES: dict[str, Event] = {
    "/v1/chat/completions": {
        "messages": HI,
        "tools": [dataplane.planes.CALC],
        "logprobs": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": "hi", "logprobs": 0, "stream_options": {"include_usage": True}},
    "/v1/messages": {
        "messages": HI,
        "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
    },
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", **FUNCTION}],
        "include": ["message.output_text.logprobs"],
    },
    GOOGLE: {
        "contents": [{"parts": [{"text": "hi"}]}],
        "tools": [{"function_declarations": [FUNCTION]}],
        "response_logprobs": True,
    },
}
LIMIT = {"/v1/responses": "max_output_tokens", GOOGLE: "max_output_tokens"}
STOPS = {
    "/v1/chat/completions": "stop",
    "/v1/completions": "stop",
    "/v1/messages": "stop_sequences",
    GOOGLE: "stop_sequences",
}


def chat(events: list[Event]) -> Said:
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    return {
        "text": "".join(delta.get("content") or "" for delta in deltas),
        "calls": [call for delta in deltas for call in delta.get("tool_calls", ())],
        "logprobs": [token for c in choices if c["logprobs"] for token in c["logprobs"]["content"]],
        "end": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [event["usage"] for event in events if "usage" in event],
    }


def completions(events: list[Event]) -> Said:
    choices = [choice for event in events for choice in event["choices"]]
    kinds = ("tokens", "token_logprobs", "text_offset")
    return {
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": {
            kind: [value for c in choices if c["logprobs"] for value in c["logprobs"][kind]] for kind in kinds
        },
        "end": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [event["usage"] for event in events if "usage" in event],
    }


def messages(events: list[Event]) -> Said:
    blocks: list[list[Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append([event["content_block"], ""])
        elif event["type"] == "content_block_delta":
            [delta] = [value for name, value in event["delta"].items() if name != "type"]
            blocks[event["index"]][1] += delta
    return {
        "text": "".join(said for block, said in blocks if block["type"] == "text"),
        "blocks": blocks,
        "end": [event for event in events if event["type"] == "message_delta"],
    }


def responses(events: list[Event]) -> Said:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    response = events[-1]["response"]
    parts = [item["content"][0] for item in response["output"] if item["type"] == "message"]
    return {
        "text": "".join(delta["delta"] for delta in deltas),
        # which of several texts has those of the calls between them depends on what arrives together
        "logprobs": [token for part in parts for token in part.pop("logprobs")],
        "end": {name: value for name, value in response.items() if name != "created_at"},
    }


def google(events: list[Event]) -> Said:
    candidates = [candidate for event in events for candidate in event["candidates"]]
    parts = [part for candidate in candidates for part in candidate["content"]["parts"]]
    results = [candidate["logprobsResult"] for candidate in candidates if "logprobsResult" in candidate]
    return {
        "text": "".join(part.get("text", "") for part in parts),
        "calls": [part["functionCall"] for part in parts if "functionCall" in part],
        "logprobs": [token for result in results for token in result["chosenCandidates"]],
        "end": [candidate["finishReason"] for candidate in candidates if "finishReason" in candidate],
        "usage": [event["usageMetadata"] for event in events if "usageMetadata" in event],
    }


READERS: dict[str, Callable[[list[Event]], Said]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/messages": messages,
    "/v1/responses": responses,
    GOOGLE: google,
}


@pytest.fixture(scope="module")
def served_run(tmp_path_factory: pytest.TempPathFactory, model_dir: str, renderer: Renderer) -> ServedRun:
    folder: Path = tmp_path_factory.mktemp("streams")
    changes = {"run_dir": str(folder), "model_dir": model_dir, "context_length": 4096}
    state = RunState(RunSpec.model_validate(dataplane.specs.SPEC | changes), MemoryBudget())
    return ServedRun(state, renderer, Journal(folder / "run.journal"), 10.0)


async def say(run: ServedRun, path: str, more: Event, chunks: list[tuple[Chunk, int]]) -> Said:
    """Content of a stream in this dialect; each chunk comes with the number of event loop turns after it."""
    session = Session("s")
    dialect = find_dialect(path)
    assert dialect is not None
    body = {"model": "policy", "stream": True, **BODIES[path], **more}
    [request] = dialect.parse(body, session)
    [subscriber] = await open_turns(run.turns, session, [request], RequestFingerprint.from_request([], b""))
    reply = dialect.reply(body, subscriber.turn.turn_id, session)
    sent = [reply.start(subscriber.turn.num_prompt_tokens)]

    async def forward() -> None:
        async for pieces in subscriber.pieces():
            sent.append(reply.piece(0, pieces))

    forwarding = asyncio.ensure_future(forward())
    await asyncio.sleep(0)
    [generation] = session.running
    for chunk, loops in chunks:
        # it may have ended with a stop string before
        if not generation.is_over:
            generation.append(chunk, "e0")
        for _ in range(loops):
            await asyncio.sleep(0)
    await asyncio.wait_for(forwarding, patience())
    answer = subscriber.turn.answer()
    subscriber.leave()
    sent += [reply.end_turn(0, answer), reply.end([answer])]
    events = re.findall(rb"data: (\{.*\})\n\n", b"".join(sent))
    said = READERS[path]([orjson.loads(event) for event in events])
    assert said["text"] == answer.content
    return said


def cut(ids: list[int], edges: list[int], reason: FinishReason, seams: set[int]) -> list[Chunk]:
    """The ids as chunks cut at `edges`; a chunk that ends at a seam is interrupted there."""
    chunks = []
    for start, end in zip([0, *edges], [*edges, len(ids)], strict=True):
        is_last = end == len(ids)
        why = reason if is_last else FinishReason.ABORT if end in seams else None
        chunks.append(Chunk("r", ids[start:end], [-(1 + i) / 8 for i in range(start, end)], 0, why))
    return chunks


TEXTS = [
    "fox ",
    "naïve",
    "数学は",
    " ",
    "\n",
    STOP,
    "the",
    "lazy",
    dataplane.planes.tool_call_text(expression="4*8"),
    "<tool_call>",
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("has_stop", [False, True])
@settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    parts=st.lists(st.one_of(st.sampled_from(TEXTS), st.integers(2, 257)), min_size=1, max_size=8),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    data=st.data(),
)
async def test_however_tokens_arrive_a_stream_says_the_same(
    served_run: ServedRun,
    renderer: Renderer,
    path: str,
    has_stop: bool,
    parts: list[str | int],
    reason: FinishReason,
    data: st.DataObject,
) -> None:
    ids = [i for part in parts for i in ([part] if isinstance(part, int) else renderer.encode(part).tolist())]
    if reason is FinishReason.STOP:
        ids.append(renderer.stop_token_ids[0])
    more: Event = {LIMIT.get(path, "max_tokens"): len(ids)}
    if has_stop and path in STOPS:
        more[STOPS[path]] = [STOP]
    edges = st.sets(st.integers(1, len(ids) - 1)) if len(ids) > 1 else st.just(set[int]())
    places = sorted(data.draw(edges, "edges"))
    seams = data.draw(st.sets(st.sampled_from(places)), "seams") if places else set()
    loops = data.draw(
        st.lists(st.integers(0, 6), min_size=len(places) + 1, max_size=len(places) + 1), "loops"
    )
    event_s = data.draw(st.sampled_from([0.0, 1e9]), "event_s")

    async def stream(pace: StreamPace, chunks: list[tuple[Chunk, int]]) -> Said:
        served_run.turns.pace = pace
        return await say(served_run, path, more, chunks)

    one_by_one = cut(ids, list(range(1, len(ids))), reason, set())
    expected = await stream(StreamPace(0.0), [(chunk, 6) for chunk in one_by_one])
    chunks = cut(ids, places, reason, seams)
    assert await stream(StreamPace(event_s), list(zip(chunks, loops, strict=True))) == expected
