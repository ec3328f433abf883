"""The control routes, each declared once: commands of flows and runners, and of agents on their sessions.

What a command does is in the modules that it calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sf_core.dataplane import bodies
from sf_core.dataplane.control.arrow_stream import MEDIA_TYPE, arrow_stream, batch_files
from sf_core.dataplane.control.control_route import MAX_WAIT_S, Answer, ControlRoute, Handler
from sf_core.dataplane.control.openapi import make_document
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.control.status import batch_status, evaluation_status, run_status
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.registry import GROUPS, SESSION, SESSIONS
from sf_core.dataplane.gateway.keys import Caller, Keys
from sf_core.dataplane.gateway.lookup import no_session
from sf_core.dataplane.runs import claiming, endings
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.view import session_tree
from sf_core.types import WeightsRef

RUN = "/runs/{run_id}"
BATCH = RUN + "/batches/{index:int}"
EVALUATION = RUN + "/evaluations/{index:int}"

AT_ONCE = 512
"""Sessions that are ended between two other requests; they share one write of the journal."""

CONTROL_ROUTES: list[ControlRoute] = []


def _declare(
    method: str, path: str, summary: str, *refusals: int, **more: Any
) -> Callable[[Handler], Handler]:
    """The decorated handler answers this route; see ControlRoute."""

    def add_route(handler: Handler) -> Handler:
        CONTROL_ROUTES.append(ControlRoute(method, path, summary, handler, *refusals, **more))
        return handler

    return add_route


_get = partial(_declare, "GET")
_post = partial(_declare, "POST")

# --- sessions


@_post(SESSIONS, "Open a session for an external agent.", 404, 429, 503)
async def open_session(plane: DataPlane, request: Request, body: bodies.SessionBody) -> Answer:
    caller: Caller = request.scope["caller"]
    session = await plane.open_session(body, caller)
    return _place_of(plane.run(body.run_id), session, request)


@_post(GROUPS, "Declare a group for external agents.", 404, 409, 429, 503)
async def declare_group(plane: DataPlane, request: Request, run_id: str, body: bodies.GroupBody) -> Answer:
    sessions = await plane.declare(run_id, body, request.scope["caller"])
    places = [session.claim.place for session in sessions if session.claim]
    return {
        # of a held-out one, the policy version that is evaluated
        "group": places[0].group,
        "sessions": [
            {**_place_of(plane.run(run_id), session, request), "member": place.member}
            for session, place in zip(sessions, places, strict=True)
        ],
    }


def _place_of(run: ServedRun, session: Session, request: Request) -> dict[str, Any]:
    """Where the agent of an external session finds its endpoint, and the key of this session alone."""
    key = _keys(request).of_session(run.spec, session.session_id)
    base_url = f"{request.base_url}sessions/{session.session_id}/v1"
    return {"session_id": session.session_id, "base_url": base_url, "key": key}


def _keys(request: Request) -> Keys:
    caller: Caller = request.scope["caller"]
    return caller.keys


@_get(SESSION, "Get the turn tree of a session.", 503)
async def tree(run: ServedRun, session: Session) -> Answer:
    return session_tree(run.spec, session)


@_post(SESSION + "/reward", "Give a session a reward before it ends.", recorded=True, confirmed=True)
async def reward(run: ServedRun, session: Session, body: bodies.RewardBody) -> None:
    await endings.reward(run, session, body)


@_post(SESSION + "/finish", "End a session.", 409, 503)
async def finish(plane: DataPlane, request: Request, session_id: str, body: bodies.FinishBody) -> None:
    caller: Caller = request.scope["caller"]
    run = plane.find_ended(session_id, caller)
    if run is None or not endings.answer_late(run, session_id, body):
        run, session = plane.find_session(session_id, caller)
        if not await run.journal.attend(endings.finish(run, session, body)):
            raise no_session(session_id)
    await run.confirm()


@_post(RUN + "/finished", "End several sessions.", recorded=True, confirmed=True)
async def finish_many(run: ServedRun, body: bodies.FinishedBody) -> Answer:
    ends: list[bool | BaseException] = []
    for at in range(0, len(body.sessions), AT_ONCE):
        ending = (_finish_one(run, report) for report in body.sessions[at : at + AT_ONCE])
        ends += await asyncio.gather(*ending, return_exceptions=True)
    finished = []
    refused = {}
    for report, end in zip(body.sessions, ends, strict=True):
        if isinstance(end, ApiError) and end.retry_after_s is None:
            refused[report.session_id] = end.message
        elif isinstance(end, BaseException):
            # a retry of the request finds that the others have finished
            raise end
        elif end:
            finished.append(report.session_id)
    return {"finished": finished, "refused": refused}


async def _finish_one(run: ServedRun, report: bodies.FinishedReport) -> bool:
    """Whether the session has ended by this report, now or before."""
    if (session := run.sessions.get(report.session_id)) is None:
        return endings.answer_late(run, report.session_id, report)
    return await endings.finish(run, session, report)


# --- runs


@_post("/runs", "Register a run, or start another attempt on a run.", 409, 503)
async def register(plane: DataPlane, body: bodies.RunSpec) -> Answer:
    return run_status(await plane.register(body))


@_get(RUN, "Get the status of a run.")
async def status(run: ServedRun) -> Answer:
    return run_status(run)


@_post(RUN + "/claim", "Claim sessions for a runner.", 503)
async def claim(run: ServedRun, request: Request, body: bodies.ClaimBody) -> Answer:
    keys = _keys(request)
    body = body.model_copy(update={"wait_s": min(body.wait_s, MAX_WAIT_S)})
    sessions, released = await claiming.claim(run, body)
    return {
        "sessions": [
            {
                "session_id": session.session_id,
                # all that its agent is given: the runner's own key opens every route
                "key": keys.of_session(run.spec, session.session_id),
                "split": claim.place.split,
                **_task(run, claim),
                "group": claim.place.group,
                "member": claim.place.member,
                "attempt": claim.attempt,
                "answer": session.answer,
                "scoring": session.scoring,
            }
            for session in sessions
            if (claim := session.claim) is not None
        ],
        # sessions that ran too long or whose group no longer counts, for the runner to stop
        "ended": [name for name in body.running or () if name not in run.sessions],
        "scored_elsewhere": claiming.is_scored_elsewhere(run),
        "released": released,
    }


def _task(run: ServedRun, claim: Claim) -> dict[str, Any]:
    """Which task of the environment a session works on."""
    if claim.place.split == "holdout":
        return {"source": "", "task_index": claim.place.member}
    task = run.state.ledger.task_of(claim)
    return {"source": task.source, "task_index": task.number}


@_get(BATCH, "Get the progress of a batch.")
async def batch(run: ServedRun, index: int, wait_s: float) -> Answer:
    await run.changed.until(lambda: bool(run.released or run.fault) or run.readiness(index).ready, wait_s)
    return batch_status(run, index)


@_get(
    BATCH + "/stream",
    "Get the trajectories of a sealed batch, as an Arrow stream.",
    confirmed=True,
    answers=MEDIA_TYPE,
)
async def stream_batch(plane: DataPlane, run: ServedRun, index: int, wait_s: float) -> Response:
    files = await batch_files(run, plane.sealers[run.spec.run_id], index, wait_s)
    stream = arrow_stream(files, sees=run.renderer.sight is not None)
    # a status cannot say any more that a file cannot be opened once the answer has begun
    first = await asyncio.to_thread(next, stream)
    return StreamingResponse(chain([first], stream), media_type=MEDIA_TYPE)


@_post(BATCH + "/seal", "Seal a batch: write it into the run directory.", recorded=True, confirmed=True)
async def seal_batch(plane: DataPlane, run: ServedRun, index: int, body: bodies.SealBody) -> Answer:
    return await plane.sealers[run.spec.run_id].seal_batch(index, body.attempt)


@_post(EVALUATION, "Start the evaluation of a policy version.", 409, recorded=True)
async def start_evaluation(run: ServedRun, index: int, body: bodies.EvaluationBody) -> None:
    await run.start_evaluation(index, body.num_tasks)


@_get(EVALUATION, "Get the progress of an evaluation.")
async def evaluation(run: ServedRun, index: int, wait_s: float) -> Answer:
    if (group := run.state.ledger.evaluations.get(index)) is None:
        raise ApiError(404, f"No evaluation of version {index} was started.")
    await run.changed.until(lambda: bool(run.released or run.fault) or group.is_complete, wait_s)
    return evaluation_status(run, group)


@_post(
    EVALUATION + "/seal",
    "Seal an evaluation: write it into the run directory.",
    recorded=True,
    confirmed=True,
)
async def seal_evaluation(plane: DataPlane, run: ServedRun, index: int, body: bodies.SealBody) -> Answer:
    return await plane.sealers[run.spec.run_id].seal_evaluation(index, body.attempt)


@_post(RUN + "/weights", "Publish a policy version to all engines.", 409, recorded=True)
async def publish(plane: DataPlane, run: ServedRun, body: bodies.WeightsBody) -> Answer:
    return await plane.publish(run, WeightsRef(body.version, body.uri))


@_post(RUN + "/leases/{lease_id}/revoke", "Revoke a lease and disconnect its engine.", recorded=True)
async def revoke(plane: DataPlane, run: ServedRun, lease_id: str, body: bodies.RevokeBody) -> Answer:
    return await plane.revoke(run, lease_id, body.within_s)


@_post(RUN + "/pause", "Pause sampling.", recorded=True)
async def pause(run: ServedRun, body: bodies.PauseBody) -> Answer:
    started = time.monotonic()
    num_engines = await run.pause(body.mode, body.engine)
    return {"engines": num_engines, "seconds": time.monotonic() - started}


@_post(RUN + "/resume", "Resume sampling.", recorded=True)
async def resume(run: ServedRun, body: bodies.ResumeBody) -> None:
    await run.resume(body.engine)


@_post(
    RUN + "/engines/{engine_id:path}/drain",
    "Drain an engine: it finishes its turns, then disconnects.",
    recorded=True,
)
async def drain(run: ServedRun, engine_id: str) -> Answer:
    engine = run.router.find(engine_id)
    # if its connection breaks meanwhile, it must not be taken back
    await run.revoke(engine.lease_id)
    run.router.drain(engine, "drained")
    return {"running": len(engine.in_flight)}


@_post(RUN + "/runners/{runner:path}/alive", "Send the heartbeat of a runner, which keeps its sessions.")
async def alive(run: ServedRun, runner: str) -> None:
    run.runners.hear(runner)


@_post(RUN + "/release", "Release a run whose flow has ended: runners and engines disconnect.", recorded=True)
async def release(plane: DataPlane, run: ServedRun, body: bodies.ReleaseBody) -> None:
    if body.attempt is None or body.attempt == run.spec.attempt:
        await plane.release(run)


@_post(RUN + "/stage", "Set the current stage of the flow.")
async def stage(run: ServedRun, body: bodies.StageBody) -> None:
    run.stage = body.model_dump()


# --- the data plane


@_get("/healthz", "Check that the data plane answers.")
async def health(plane: DataPlane) -> Answer:
    return {"runs": len(plane.runs)}


@_get("/openapi.json", "Get the OpenAPI document.")
async def openapi(request: Request) -> Answer:
    return make_document(request.app.routes)
