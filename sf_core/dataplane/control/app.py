"""The routes of the data plane: for agent runners, flows and engines, and those of agents (agent_routes.py).

Owns paths. What a route does is in the modules that it calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from sf_core.dataplane.bodies import (
    MAX_INDEX,
    ClaimBody,
    EvaluationBody,
    FinishBody,
    FinishedBody,
    PauseBody,
    ReleaseBody,
    ResumeBody,
    RevokeBody,
    RewardBody,
    RunSpec,
    SealBody,
    SessionBody,
    StageBody,
    WeightsBody,
)
from sf_core.dataplane.control.arrow_stream import MEDIA_TYPE, arrow_stream, batch_files
from sf_core.dataplane.control.engine_socket import serve_engine_link
from sf_core.dataplane.control.metrics import MemoryUse, Runs, together
from sf_core.dataplane.control.openapi import document
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.control.status import batch_status, evaluation_status, run_status
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.agent_routes import REFUSALS, SESSION, Answer, agent_routes, json_route
from sf_core.dataplane.gateway.dialects.checks import parse_body
from sf_core.dataplane.gateway.endpoint import read_body
from sf_core.dataplane.gateway.keys import KeyCheck
from sf_core.dataplane.gateway.metrics import Metrics
from sf_core.dataplane.gateway.observed import Observed
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs.recovery import MakeRun
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.types import WeightsRef

MAX_WAIT_S = 30.0


class Shards(Protocol):
    """Further processes that serve the turns of runs; see sharding."""

    @property
    def make_run(self) -> MakeRun:
        """Makes a run whose turns they serve."""

    def forwarding(self) -> Middleware:
        """Middleware that forwards agents' requests to the process that serves their session."""

    def running(self, memory: Memory) -> AbstractAsyncContextManager[None]:
        """Context in which the processes are kept alive, their sessions counted in this memory."""

    async def figures(self) -> dict[str, bytes]:
        """Prometheus texts by process."""


DEFAULTS = DataplaneOptions()

Answering = Callable[[Request], Awaitable[Answer]]


def make_app(
    key: str | None = None,
    options: DataplaneOptions = DEFAULTS,
    shards: Shards | None = None,
) -> Starlette:
    """The ASGI application; without `shards` it serves turns itself. Raises ValueError if another data plane
    uses the journal directory."""
    make_run = ServedRun if shards is None else shards.make_run
    plane = DataPlane(options, make_run)
    routes = Routes(plane)
    metrics = Metrics(Runs(plane.runs), MemoryUse(plane.memory))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with contextlib.nullcontext() if shards is None else shards.running(plane.memory):
            await plane.reopen()
            sweeping = asyncio.ensure_future(plane.sweep())
            yield
            sweeping.cancel()
        await plane.close()

    async def engines(socket: WebSocket) -> None:
        await serve_engine_link(socket, plane.runs.get)

    async def figures(request: Request) -> Response:
        text = metrics.text()
        if shards is not None:
            text = together({"hub": text, **await shards.figures()})
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    middleware = [
        Middleware(Observed, metrics=metrics),
        Middleware(KeyCheck, key=key, runs=plane.runs.values),
    ]
    if shards is not None:
        middleware.insert(0, shards.forwarding())

    async def openapi(_: Request) -> Answer:
        return document(app.routes)

    run = "/runs/{run_id}"
    app = Starlette(
        routes=[
            *agent_routes(plane.sessions),
            _post("/sessions", routes.open_session),
            _get(SESSION, routes.session),
            _post(SESSION + "/reward", routes.recorded(routes.reward)),
            _post(SESSION + "/finish", routes.recorded(routes.finish)),
            _post(run + "/finished", routes.recorded(routes.finish_many)),
            _post("/runs", routes.register),
            _get(run, routes.status),
            _post(run + "/claim", routes.claim),
            _get(run + "/batches/{index:int}", routes.batch),
            Route(run + "/batches/{index:int}/stream", routes.stream_batch, methods=["GET"]),
            _post(run + "/batches/{index:int}/seal", routes.recorded(routes.seal_batch)),
            _post(run + "/evaluations/{index:int}", routes.recorded(routes.start_evaluation)),
            _get(run + "/evaluations/{index:int}", routes.evaluation),
            _post(run + "/evaluations/{index:int}/seal", routes.recorded(routes.seal_evaluation)),
            _post(run + "/weights", routes.recorded(routes.publish)),
            _post(run + "/leases/{lease_id}/revoke", routes.recorded(routes.revoke)),
            _post(run + "/pause", routes.recorded(routes.pause)),
            _post(run + "/resume", routes.recorded(routes.resume)),
            _post(run + "/engines/{engine_id:path}/drain", routes.recorded(routes.drain)),
            _post(run + "/runners/{runner:path}/retire", routes.retire),
            _post(run + "/runners/{runner:path}/alive", routes.alive),
            _post(run + "/release", routes.recorded(routes.release)),
            _post(run + "/stage", routes.stage),
            _get("/healthz", routes.health),
            _get("/openapi.json", openapi),
            Route("/metrics", figures),
            WebSocketRoute("/engines", engines),
        ],
        middleware=middleware,
        exception_handlers=REFUSALS,
        lifespan=lifespan,
    )
    return app


class Routes:
    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def recorded(self, answer: Answering) -> Answering:
        """A route that answers 503 once the journal of its run cannot be written; what the request has begun
        then goes on in the background until it can."""

        async def attended(request: Request) -> Answer:
            is_of_run = "run_id" in request.path_params
            try:
                run = self._run(request) if is_of_run else self._session(request)[0]
            except ApiError:
                # the route refuses it, for this reason or for one that it checks before
                return await answer(request)
            return await run.journal.attend(answer(request))

        return attended

    async def open_session(self, request: Request) -> Answer:
        body = parse_body(SessionBody, await read_body(request.receive))
        session = await self._plane.open_session(body, request.scope["caller"])
        return {
            "session_id": session.session_id,
            "base_url": f"{request.base_url}sessions/{session.session_id}/v1",
        }

    async def session(self, request: Request) -> Answer:
        run, session = self._session(request)
        return await run.tree(session)

    async def reward(self, request: Request) -> Answer:
        body = parse_body(RewardBody, await read_body(request.receive))
        run, session = self._session(request)
        await run.reward(session, body)
        return {}

    async def finish(self, request: Request) -> Answer:
        body = parse_body(FinishBody, await read_body(request.receive))
        run, session = self._session(request)
        await run.finish(session, body)
        return {}

    async def finish_many(self, request: Request) -> Answer:
        body = parse_body(FinishedBody, await read_body(request.receive))
        run = self._run(request)
        for report in body.sessions:
            run.closing.check(report.session_id)
        known = [report for report in body.sessions if report.session_id in run.sessions]
        # together, so that they share one write of the journal
        finishing = (run.finish(run.sessions[report.session_id], report) for report in known)
        ends = await asyncio.gather(*finishing, return_exceptions=True)
        refused = {}
        for report, error in zip(known, ends, strict=True):
            if isinstance(error, ApiError) and error.retry_after_s is None:
                refused[report.session_id] = error.message
            elif error is not None:
                # a retry passes over those that have finished
                raise error
        finished = [report.session_id for report in known if report.session_id not in refused]
        return {"finished": finished, "refused": refused}

    async def register(self, request: Request) -> Answer:
        run = await self._plane.register(parse_body(RunSpec, await read_body(request.receive)))
        return run_status(run)

    async def status(self, request: Request) -> Answer:
        return run_status(self._run(request))

    async def claim(self, request: Request) -> Answer:
        body = parse_body(ClaimBody, await read_body(request.receive))
        body = body.model_copy(update={"wait_s": min(body.wait_s, MAX_WAIT_S)})
        run = self._run(request)
        sessions, released = await run.claim(body)
        return {
            "sessions": [
                {
                    "session_id": session.session_id,
                    "split": claim.place.split,
                    "task_index": claim.place.member if claim.place.split == "holdout" else claim.place.group,
                    "group": claim.place.group,
                    "member": claim.place.member,
                    "attempt": claim.attempt,
                    "answer": session.answer,
                }
                for session in sessions
                if (claim := session.claim) is not None
            ],
            # sessions that ran too long or whose group no longer counts, for the runner to stop
            "ended": run.ended(body.running or []),
            "scored_elsewhere": run.is_scored_elsewhere,
            "released": released,
            # the runner's own key may open more; agents get the one that opens their run and nothing else
            "key": run.spec.agents_key,
        }

    async def batch(self, request: Request) -> Answer:
        run, index = self._run(request), _index(request)
        await run.changed.until(lambda: run.released or run.manager.readiness(index).ready, _wait_s(request))
        return batch_status(run, index)

    async def stream_batch(self, request: Request) -> Response:
        run, index = self._run(request), _index(request)
        files = await batch_files(run, self._plane.sealers[run.spec.run_id], index, _wait_s(request))
        return StreamingResponse(arrow_stream(files), media_type=MEDIA_TYPE)

    async def seal_batch(self, request: Request) -> Answer:
        body = parse_body(SealBody, await read_body(request.receive))
        sealer = self._plane.sealers[self._run(request).spec.run_id]
        return await sealer.seal_batch(_index(request), body.attempt)

    async def start_evaluation(self, request: Request) -> Answer:
        body = parse_body(EvaluationBody, await read_body(request.receive))
        await self._run(request).start_evaluation(_index(request), body.num_tasks)
        return {}

    async def evaluation(self, request: Request) -> Answer:
        run, version = self._run(request), _index(request)
        if (group := run.manager.evaluations.get(version)) is None:
            raise ApiError(404, f"No evaluation of version {version} was started.")
        await run.changed.until(lambda: run.released or group.is_complete, _wait_s(request))
        return evaluation_status(run, version, group)

    async def seal_evaluation(self, request: Request) -> Answer:
        body = parse_body(SealBody, await read_body(request.receive))
        sealer = self._plane.sealers[self._run(request).spec.run_id]
        return await sealer.seal_evaluation(_index(request), body.attempt)

    async def publish(self, request: Request) -> Answer:
        body = parse_body(WeightsBody, await read_body(request.receive))
        return await self._plane.publish(self._run(request), WeightsRef(body.version, body.uri))

    async def revoke(self, request: Request) -> Answer:
        body = parse_body(RevokeBody, await read_body(request.receive))
        return await self._plane.revoke(self._run(request), request.path_params["lease_id"], body.within_s)

    async def pause(self, request: Request) -> Answer:
        body = parse_body(PauseBody, await read_body(request.receive))
        started = time.monotonic()
        num_engines = await self._run(request).pause(body.mode, body.engine)
        return {"engines": num_engines, "seconds": time.monotonic() - started}

    async def resume(self, request: Request) -> Answer:
        body = parse_body(ResumeBody, await read_body(request.receive))
        await self._run(request).resume(body.engine)
        return {}

    async def drain(self, request: Request) -> Answer:
        run = self._run(request)
        link = run.router.find(request.path_params["engine_id"])
        # if its connection breaks meanwhile, it must not be taken back
        await run.revoke(link.lease_id)
        run.router.drain(link, "drained")
        return {"running": len(link.in_flight)}

    async def retire(self, request: Request) -> Answer:
        self._run(request).retire(request.path_params["runner"])
        return {}

    async def alive(self, request: Request) -> Answer:
        self._run(request).runners.hear(request.path_params["runner"])
        return {}

    async def release(self, request: Request) -> Answer:
        run, body = self._run(request), parse_body(ReleaseBody, await read_body(request.receive))
        if body.attempt is None or body.attempt == run.spec.attempt:
            await self._plane.release(run)
        return {}

    async def stage(self, request: Request) -> Answer:
        body = parse_body(StageBody, await read_body(request.receive))
        self._run(request).stage = body.model_dump()
        return {}

    async def health(self, request: Request) -> Answer:
        return {"runs": len(self._plane.runs)}

    def _session(self, request: Request) -> tuple[ServedRun, Session]:
        session_id = request.path_params["session_id"]
        for run in self._plane.runs.values():
            if session_id not in run.sessions:
                run.closing.check(session_id)
        return self._plane.sessions.session(session_id, request.scope["caller"])

    def _run(self, request: Request) -> ServedRun:
        return self._plane.run(request.path_params["run_id"])


def _get(path: str, answer: Answering) -> Route:
    return json_route(path, answer, "GET")


def _post(path: str, answer: Answering) -> Route:
    return json_route(path, answer, "POST")


def _index(request: Request) -> int:
    index: int = request.path_params["index"]
    if index > MAX_INDEX:
        raise ApiError(404, f"Numbers of batches and versions go up to {MAX_INDEX}.")
    return index


def _wait_s(request: Request) -> float:
    text = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if math.isnan(wait_s):
        raise ApiError(400, f"wait_s must be a number, got {text!r}", param="wait_s")
    return min(max(wait_s, 0.0), MAX_WAIT_S)
