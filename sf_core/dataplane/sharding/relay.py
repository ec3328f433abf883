"""Relay between the turns of gateway processes and the engines: requests go up to the hub, tokens come down.

Owns both ends. In the gateway, a turn's generation waits for tokens. In the hub, a copy of it is dispatched
by the router like any other, and forwards the chunks it absorbs. All that happens within one turn of the
event loop travels in one frame.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections.abc import Callable
from typing import Any

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.routing.generation import CacheHint, Generation, asked_by_request
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sharding.peer import Peer, read_refusal, refusal_value
from sf_core.dataplane.turns.host import TurnRouter
from sf_core.engines.wire import pack_array, unpack_array
from sf_core.types import Chunk, FinishReason, Sampling

CROWDED_S = 0.05
"""Seconds between checks whether a full wait queue has room again."""

_connections = itertools.count()


class _Outbox:
    """Gathers the values of one turn of the event loop into a frame of one kind."""

    def __init__(self, peer: Peer, kind: str) -> None:
        self._peer, self._kind = peer, kind
        self._values: list[list[Any]] = []

    def put(self, value: list[Any]) -> None:
        if not self._values:
            asyncio.get_running_loop().call_soon(self.flush)
        self._values.append(value)

    def flush(self) -> None:
        if self._values:
            values, self._values = self._values, []
            self._peer.tell(self._kind, values)


class Uplink:
    """The gateway's end: its generations that the hub's routers dispatch."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._submits = _Outbox(peer, "submit")
        self._in_flight: dict[str, Generation] = {}
        self.crowded: dict[str, ApiError] = {}
        """Why runs take no more requests, by id."""

    def submit(self, run_id: str, generation: Generation) -> None:
        self._in_flight[generation.request_id] = generation
        self._submits.put(_generation_value(run_id, generation))

    def stop(self, generation: Generation) -> None:
        if self._in_flight.pop(generation.request_id, None) is not None:
            # the stop must not overtake the request
            self._submits.flush()
            self._peer.tell("stop", generation.request_id)

    def take(self, kind: str, value: Any) -> bool:
        """True if the frame was one of these."""
        match kind:
            case "tokens":
                for progress in value:
                    self._take_progress(*progress)
            case "refused_turn":
                request_id, refusal = value
                if (generation := self._in_flight.pop(request_id, None)) is not None:
                    generation.refuse(read_refusal(refusal))
            case "crowded":
                run_id, refusal = value
                if refusal is None:
                    self.crowded.pop(run_id, None)
                else:
                    self.crowded[run_id] = read_refusal(refusal)
            case _:
                return False
        return True

    def _take_progress(
        self,
        request_id: str,
        ids: bytes,
        logprobs: bytes,
        version: int,
        reason: str | None,
        engine: str,
        interruptions: int,
        started_at: float,
    ) -> None:
        if (generation := self._in_flight.get(request_id)) is None:
            return
        if reason is not None:
            del self._in_flight[request_id]
        generation.started_at = started_at
        generation.interruptions = interruptions
        generation.absorb(
            Chunk(
                request_id,
                unpack_array("i", ids).tolist(),
                unpack_array("f", logprobs).tolist(),
                version,
                None if reason is None else FinishReason(reason),
            ),
            engine,
        )


class UplinkRouter(TurnRouter):
    """Stand-in for a run's router in a gateway process."""

    def __init__(self, run_id: str, uplink: Uplink) -> None:
        self._run_id, self._uplink = run_id, uplink

    def check_room(self) -> None:
        if (refusal := self._uplink.crowded.get(self._run_id)) is not None:
            raise refusal

    def submit(self, generation: Generation) -> None:
        generation.submitted_at = time.monotonic()
        if (asked := asked_by_request.get()) is not None:
            asked.append(generation)
        self._uplink.submit(self._run_id, generation)

    def cancel(self, generation: Generation, reason: str) -> None:
        if not generation.is_over:
            self.stop(generation)
            generation.cancel(reason)

    def stop(self, generation: Generation) -> None:
        self._uplink.stop(generation)


class Downlink:
    """The hub's end of the relay, for one gateway process as long as that lives."""

    def __init__(self, peer: Peer, find_run: Callable[[str], ServedRun | None]) -> None:
        self._peer, self._find_run = peer, find_run
        # engines know requests by id: a restarted process must not give the same ones again
        self._prefix = f"{next(_connections)}."
        self._tokens = _Outbox(peer, "tokens")
        self._in_flight: dict[str, tuple[ServedRun, _Relayed]] = {}
        self._crowded: set[str] = set()

    def take(self, kind: str, value: Any) -> bool:
        """True if the frame was one of these."""
        match kind:
            case "submit":
                for generation in value:
                    self._submit(*generation)
            case "stop":
                if (stopped := self._in_flight.pop(value, None)) is not None:
                    run, relayed = stopped
                    run.router.stop(relayed)
            case _:
                return False
        return True

    def close(self) -> None:
        """Stop the turns of a process that is gone."""
        for run, relayed in self._in_flight.values():
            run.router.stop(relayed)
        self._in_flight.clear()

    def _submit(self, run_id: str, session_id: str, request_id: str, *facts: Any) -> None:
        if (run := self._find_run(run_id)) is None:
            error = ApiError(404, f"Run {run_id} is not registered here.", code="run_not_found")
            return self._peer.tell("refused_turn", [request_id, refusal_value(error)])
        relayed = _Relayed(self, request_id, self._prefix + request_id, *facts)
        session = run.sessions.get(session_id)
        if session is not None and (claim := session.claim) is not None:
            relayed.on_start = lambda version: run.note_started(claim, version)
        self._in_flight[request_id] = run, relayed
        run.router.submit(relayed)
        self._note_crowded(run)

    def _note_crowded(self, run: ServedRun) -> None:
        """Have the gateway refuse requests before their answers begin, while the wait queue is full."""
        run_id = run.spec.run_id
        try:
            run.router.check_room()
        except ApiError as error:
            if run_id not in self._crowded:
                self._crowded.add(run_id)
                self._peer.tell("crowded", [run_id, refusal_value(error)])
                asyncio.get_running_loop().call_later(CROWDED_S, self._look_again, run)

    def _look_again(self, run: ServedRun) -> None:
        self._crowded.discard(run.spec.run_id)
        self._note_crowded(run)
        if run.spec.run_id not in self._crowded:
            self._peer.tell("crowded", [run.spec.run_id, None])

    def forward(self, request_id: str, relayed: Generation, chunk: Chunk, engine: str) -> None:
        if relayed.finish_reason is not None:
            self._in_flight.pop(request_id, None)
        self._tokens.put(
            [
                request_id,
                pack_array("i", chunk.token_ids),
                pack_array("f", chunk.logprobs),
                chunk.version,
                relayed.finish_reason,
                engine,
                relayed.interruptions,
                relayed.started_at,
            ]
        )

    def forward_refusal(self, request_id: str, refusal: ApiError) -> None:
        self._in_flight.pop(request_id, None)
        self._tokens.flush()
        self._peer.tell("refused_turn", [request_id, refusal_value(refusal)])


class _Relayed(Generation):
    """Copy of a gateway's generation, for the hub's router."""

    def __init__(
        self,
        downlink: Downlink,
        below: str,
        request_id: str,
        ids: bytes,
        num_sampled: int,
        max_tokens: int,
        stop_token_ids: list[int],
        sampling: list[Any],
        stream: bool,
        floor: int,
        near: list[Any] | None,
        interruptions: int,
    ) -> None:
        all_ids: array[int] = unpack_array("i", ids)
        num_prompt = len(all_ids) - num_sampled
        super().__init__(
            request_id,
            all_ids[:num_prompt],
            Sampling(*sampling),
            max_tokens,
            tuple(stop_token_ids),
            stream=stream,
            floor=floor,
        )
        # sampled before this hub knew of it: only their number and the last version matter here
        self.token_ids = all_ids[num_prompt:]
        self.logprobs = array("f", bytes(4 * num_sampled))
        self.versions = array("i", [floor]) * num_sampled
        self.interruptions = interruptions
        self.near = None if near is None else CacheHint(*near)
        self._downlink, self._below = downlink, below

    def absorb(self, chunk: Chunk, engine: str) -> bool:
        goes_on = super().absorb(chunk, engine)
        self._downlink.forward(self._below, self, chunk, engine)
        return goes_on

    def refuse(self, refusal: ApiError) -> None:
        super().refuse(refusal)
        self._downlink.forward_refusal(self._below, refusal)


def _generation_value(run_id: str, generation: Generation) -> list[Any]:
    sampling, near = generation.sampling, generation.near
    return [
        run_id,
        generation.session_id,
        generation.request_id,
        pack_array("i", generation.prompt_ids + generation.token_ids),
        len(generation.token_ids),
        generation.max_tokens,
        generation.stop_token_ids,
        [sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed],
        generation.stream,
        generation.floor,
        None if near is None else [near.engine_id, near.version, near.num_tokens],
        generation.interruptions,
    ]
