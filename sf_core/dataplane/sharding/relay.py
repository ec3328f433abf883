"""Relay between the turns of gateway processes and the engines: requests go up to the hub, tokens come down.

Owns both ends. In the gateway, a turn's generation waits for tokens. In the hub, a copy of it is dispatched
by the router like any other, and forwards the chunks it absorbs.
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
from sf_core.types import Chunk, FinishReason, Sampling

CROWDED_S = 0.05
"""Seconds between checks whether a full wait queue has room again."""

_connections = itertools.count()


class Uplink:
    """The gateway's end: its generations that the hub's routers dispatch."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        peer.handlers |= {
            "tokens": self._take_tokens,
            "refused_turn": self._take_refusal,
            "crowded": self._take_crowded,
        }
        self.in_flight: dict[str, Generation] = {}
        """Generations by the id of their request."""
        self.crowded: dict[str, ApiError] = {}
        """Why runs take no more requests, by id."""

    def _take_tokens(self, *chunks: list[Any]) -> None:
        for request_id, ids, logprobs, version, reason, engine, interruptions, started_at in chunks:
            if (generation := self.in_flight.get(request_id)) is None:
                continue
            if reason is not None:
                del self.in_flight[request_id]
                reason = FinishReason(reason)
            generation.started_at, generation.interruptions = started_at, interruptions
            generation.absorb(Chunk(request_id, ids, logprobs, version, reason), engine)

    def _take_refusal(self, request_id: str, refusal: list[Any]) -> None:
        if (generation := self.in_flight.pop(request_id, None)) is not None:
            generation.refuse(read_refusal(refusal))

    def _take_crowded(self, run_id: str, refusal: list[Any] | None) -> None:
        self.crowded.pop(run_id, None)
        if refusal is not None:
            self.crowded[run_id] = read_refusal(refusal)


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
        self._uplink.in_flight[generation.request_id] = generation
        sampling, near = generation.sampling, generation.near
        self._uplink.peer.tell_soon(
            "submit",
            [
                self._run_id,
                generation.session_id,
                generation.request_id,
                (generation.prompt_ids + generation.token_ids).tobytes(),
                len(generation.token_ids),
                generation.max_tokens,
                generation.stop_token_ids,
                [sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed],
                generation.stream,
                generation.floor,
                None if near is None else [near.engine_id, near.version, near.num_tokens],
                generation.interruptions,
            ],
        )

    def cancel(self, generation: Generation, reason: str) -> None:
        if not generation.is_over:
            self.stop(generation)
            generation.cancel(reason)

    def stop(self, generation: Generation) -> None:
        if self._uplink.in_flight.pop(generation.request_id, None) is not None:
            self._uplink.peer.tell("stop", generation.request_id)


class Downlink:
    """The hub's end of the relay, for one gateway process as long as that lives."""

    def __init__(self, peer: Peer, find_run: Callable[[str], ServedRun | None]) -> None:
        self.peer, self._find_run = peer, find_run
        peer.handlers |= {"submit": self._submit_all, "stop": self._stop}
        # engines know requests by id: a restarted process must not give the same ones again
        self._prefix = f"{next(_connections)}."
        self.in_flight: dict[str, tuple[ServedRun, _Relayed]] = {}
        """Turns by the gateway's id of the request."""
        self._crowded: set[str] = set()

    def close(self) -> None:
        """Stop the turns of a process that is gone."""
        for request_id in list(self.in_flight):
            self._stop(request_id)

    def _stop(self, request_id: str) -> None:
        if (stopped := self.in_flight.pop(request_id, None)) is not None:
            run, relayed = stopped
            run.router.stop(relayed)

    def _submit_all(self, *generations: list[Any]) -> None:
        for generation in generations:
            self._submit(*generation)

    def _submit(self, run_id: str, session_id: str, request_id: str, *facts: Any) -> None:
        if (run := self._find_run(run_id)) is None:
            error = ApiError(404, f"Run {run_id} is not registered here.", code="run_not_found")
            return self.peer.tell("refused_turn", request_id, refusal_value(error))
        relayed = _Relayed(self, request_id, self._prefix + request_id, *facts)
        session = run.sessions.get(session_id)
        if session is not None and (claim := session.claim) is not None:
            relayed.on_start = lambda version: run.note_started(claim, version)
        self.in_flight[request_id] = run, relayed
        run.router.submit(relayed)
        if run_id not in self._crowded:
            self._note_crowded(run)

    def _note_crowded(self, run: ServedRun) -> None:
        """Have the gateway refuse requests before their answers begin, while the wait queue is full."""
        run_id = run.spec.run_id
        try:
            run.router.check_room()
        except ApiError as error:
            self._crowded.add(run_id)
            self.peer.tell("crowded", run_id, refusal_value(error))
            asyncio.get_running_loop().call_later(CROWDED_S, self._note_crowded, run)
        else:
            if run_id in self._crowded:
                self._crowded.discard(run_id)
                self.peer.tell("crowded", run_id, None)


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
        """`below` is the gateway's id of the request."""
        prompt_ids = array("i", ids)
        num_prompt = len(prompt_ids) - num_sampled
        # sampled before this hub knew of it: only their number and the last version matter here
        sampled = prompt_ids[num_prompt:]
        del prompt_ids[num_prompt:]
        stops = tuple(stop_token_ids)
        super().__init__(
            request_id, prompt_ids, Sampling(*sampling), max_tokens, stops, stream=stream, floor=floor
        )
        self.token_ids = sampled
        self.logprobs = array("f", bytes(4 * num_sampled))
        self.versions = array("i", [floor]) * num_sampled
        self.interruptions = interruptions
        self.near = None if near is None else CacheHint(*near)
        self._downlink, self._below = downlink, below

    def absorb(self, chunk: Chunk, engine: str) -> bool:
        goes_on = super().absorb(chunk, engine)
        if self.finish_reason is not None:
            self._downlink.in_flight.pop(self._below, None)
        tokens = [self._below, chunk.token_ids, chunk.logprobs, chunk.version, self.finish_reason]
        self._downlink.peer.tell_soon("tokens", [*tokens, engine, self.interruptions, self.started_at])
        return goes_on

    def refuse(self, refusal: ApiError) -> None:
        super().refuse(refusal)
        self._downlink.in_flight.pop(self._below, None)
        self._downlink.peer.tell("refused_turn", self._below, refusal_value(refusal))
