"""The control routes, each declared once: commands of flows and runners, and of agents on their sessions.

What a command does is in the modules that it calls.
"""

from __future__ import annotations

import asyncio
import time
from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sf_core.dataplane import api_schemas
from sf_core.dataplane.control.arrow_stream import MEDIA_TYPE, arrow_stream, batch_files
from sf_core.dataplane.control.control_route import MAX_WAIT_S, Answer, ControlRouter
from sf_core.dataplane.control.openapi import make_document
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.control.status import batch_status, evaluation_status, run_status
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.access import Caller, no_session
from sf_core.dataplane.gateway.dialects.registry import GROUPS, SESSION, SESSIONS
from sf_core.dataplane.runs import claiming, endings
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.export import session_tree
from sf_core.dataplane.sessions.session import Session
from sf_core.types import WeightsRef

RUN = "/runs/{run_id}"
BATCH = RUN + "/batches/{index:int}"
EVALUATION = RUN + "/evaluations/{index:int}"

AT_ONCE = 512
"""Sessions that are ended between two other requests; they share one write of the journal."""

router = ControlRouter()

# --- sessions


@router.post(SESSIONS, "Open a session for an external agent.", refusals=[404, 429, 503])
async def open_session(
    plane: DataPlane, request: Request, caller: Caller, body: api_schemas.SessionBody
) -> Answer:
    session = await plane.open_session(body, caller)
    return _access_to(plane.run(body.run_id), session, request, caller)


@router.post(GROUPS, "Declare a group for external agents.", refusals=[404, 409, 429, 503])
async def declare_group(
    plane: DataPlane, request: Request, caller: Caller, run_id: str, body: api_schemas.GroupBody
) -> Answer:
    sessions = await plane.declare(run_id, body, caller)
    run = plane.run(run_id)
    places = [session.claim.slot for session in sessions if session.claim]
    return {
        # of a held-out one, the policy version that is evaluated
        "group": places[0].group,
        "sessions": [
            {**_access_to(run, session, request, caller), "member": place.member}
            for session, place in zip(sessions, places, strict=True)
        ],
    }


def _access_to(run: ServedRun, session: Session, request: Request, caller: Caller) -> dict[str, Any]:
    """The endpoint of an external session, for its agent, and the key of this session alone."""
    return {
        "session_id": session.session_id,
        "base_url": f"{request.base_url}sessions/{session.session_id}/v1",
        "key": caller.keys.of_session(run.spec, session.session_id),
    }


@router.get(SESSION, "Get the turn tree of a session.", refusals=[503])
async def tree(run: ServedRun, session: Session) -> Answer:
    return session_tree(run.spec, session)


@router.post(SESSION + "/reward", "Give a session a reward before it ends.", recorded=True, confirmed=True)
async def reward(run: ServedRun, session: Session, body: api_schemas.RewardBody) -> None:
    await endings.reward(run, session, body)


@router.post(SESSION + "/finish", "End a session.", refusals=[409, 503])
async def finish(plane: DataPlane, caller: Caller, session_id: str, body: api_schemas.FinishBody) -> None:
    run = plane.find_ended(session_id, caller)
    if run is None or not endings.answer_late(run, session_id, body):
        run, session = plane.find_session(session_id, caller)
        if not await run.journal.await_unless_failing(endings.finish(run, session, body)):
            raise no_session(session_id)
    await run.confirm()


@router.post(RUN + "/finished", "End several sessions.", recorded=True, confirmed=True)
async def finish_many(run: ServedRun, body: api_schemas.FinishedBody) -> Answer:
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


async def _finish_one(run: ServedRun, report: api_schemas.FinishedReport) -> bool:
    """Whether the session has ended by this report, now or before."""
    if (session := run.sessions.get(report.session_id)) is None:
        return endings.answer_late(run, report.session_id, report)
    return await endings.finish(run, session, report)


# --- runs


@router.post("/runs", "Register a run, or start another attempt on a run.", refusals=[409, 503])
async def register(plane: DataPlane, body: api_schemas.RunSpec) -> Answer:
    return run_status(await plane.register(body))


@router.get(RUN, "Get the status of a run.")
async def status(run: ServedRun) -> Answer:
    return run_status(run)


@router.post(RUN + "/claim", "Claim sessions for a runner.", refusals=[503])
async def claim(run: ServedRun, caller: Caller, body: api_schemas.ClaimBody) -> Answer:
    body = body.model_copy(update={"wait_s": min(body.wait_s, MAX_WAIT_S)})
    sessions, released = await claiming.claim(run, body)
    return {
        "sessions": [_describe_claimed(run, session, caller) for session in sessions if session.claim],
        # sessions that ran too long or whose group no longer counts, for the runner to stop
        "ended": [session_id for session_id in body.running or () if session_id not in run.sessions],
        "scored_elsewhere": claiming.is_scored_elsewhere(run),
        "released": released,
    }


def _describe_claimed(run: ServedRun, session: Session, caller: Caller) -> dict[str, Any]:
    """What a runner needs to run the agent of a session, or to score its answer."""
    claimed = session.claim
    assert claimed is not None
    return {
        "session_id": session.session_id,
        # the agent gets only this key, because the runner's own key opens every route
        "key": caller.keys.of_session(run.spec, session.session_id),
        "split": claimed.slot.split,
        **_task_of(run, claimed),
        "group": claimed.slot.group,
        "member": claimed.slot.member,
        "attempt": claimed.attempt,
        "answer": session.answer,
        "scoring": session.scoring,
    }


def _task_of(run: ServedRun, claimed: Claim) -> dict[str, Any]:
    """The task of the environment that a session works on."""
    if claimed.slot.split == "holdout":
        return {"source": "", "task_index": claimed.slot.member}
    task = run.state.ledger.task_of(claimed)
    return {"source": task.source, "task_index": task.number}


@router.get(BATCH, "Get the progress of a batch.")
async def batch(run: ServedRun, index: int, wait_s: float) -> Answer:
    await run.changed.until(lambda: bool(run.released or run.fault) or run.readiness(index).ready, wait_s)
    return batch_status(run, index)


@router.get(
    BATCH + "/stream",
    "Get the trajectories of a sealed batch, as an Arrow stream.",
    confirmed=True,
    media_type=MEDIA_TYPE,
)
async def stream_batch(plane: DataPlane, run: ServedRun, index: int, wait_s: float) -> Response:
    files = await batch_files(run, plane.sealers[run.spec.run_id], index, wait_s)
    stream = arrow_stream(files, is_multimodal=run.renderer.image_processor is not None)
    # a status cannot say any more that a file cannot be opened once the answer has begun
    first = await asyncio.to_thread(next, stream)
    return StreamingResponse(chain([first], stream), media_type=MEDIA_TYPE)


@router.post(BATCH + "/seal", "Seal a batch: write it into the run directory.", recorded=True, confirmed=True)
async def seal_batch(plane: DataPlane, run: ServedRun, index: int, body: api_schemas.SealBody) -> Answer:
    return await plane.sealers[run.spec.run_id].seal_batch(index, body.attempt)


@router.post(EVALUATION, "Start the evaluation of a policy version.", refusals=[409], recorded=True)
async def start_evaluation(run: ServedRun, index: int, body: api_schemas.EvaluationBody) -> None:
    await run.start_evaluation(index, body.num_tasks)


@router.get(EVALUATION, "Get the progress of an evaluation.")
async def evaluation(run: ServedRun, index: int, wait_s: float) -> Answer:
    if (group := run.state.ledger.evaluations.get(index)) is None:
        raise ApiError(404, f"No evaluation of version {index} was started.")
    await run.changed.until(lambda: bool(run.released or run.fault) or group.is_complete, wait_s)
    return evaluation_status(run, group)


@router.post(
    EVALUATION + "/seal",
    "Seal an evaluation: write it into the run directory.",
    recorded=True,
    confirmed=True,
)
async def seal_evaluation(plane: DataPlane, run: ServedRun, index: int, body: api_schemas.SealBody) -> Answer:
    return await plane.sealers[run.spec.run_id].seal_evaluation(index, body.attempt)


@router.post(RUN + "/weights", "Publish a policy version to all engines.", refusals=[409], recorded=True)
async def publish(plane: DataPlane, run: ServedRun, body: api_schemas.WeightsBody) -> Answer:
    return await plane.publish(run, WeightsRef(body.version, body.uri))


@router.post(RUN + "/leases/{lease_id}/revoke", "Revoke a lease and disconnect its engine.", recorded=True)
async def revoke(plane: DataPlane, run: ServedRun, lease_id: str, body: api_schemas.RevokeBody) -> Answer:
    return await plane.revoke(run, lease_id, body.within_s)


@router.post(RUN + "/pause", "Pause sampling.", recorded=True)
async def pause(run: ServedRun, body: api_schemas.PauseBody) -> Answer:
    started = time.monotonic()
    num_engines = await run.pause(body.mode, body.engine)
    return {"engines": num_engines, "seconds": time.monotonic() - started}


@router.post(RUN + "/resume", "Resume sampling.", recorded=True)
async def resume(run: ServedRun, body: api_schemas.ResumeBody) -> None:
    await run.resume(body.engine)


@router.post(
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


@router.post(
    RUN + "/runners/{runner:path}/alive", "Send the heartbeat of a runner, which keeps its sessions."
)
async def alive(run: ServedRun, runner: str) -> None:
    run.runners.hear(runner)


@router.post(
    RUN + "/release", "Release a run whose flow has ended: runners and engines disconnect.", recorded=True
)
async def release(plane: DataPlane, run: ServedRun, body: api_schemas.ReleaseBody) -> None:
    if body.attempt is None or body.attempt == run.spec.attempt:
        await plane.release(run)


@router.post(RUN + "/stage", "Set the current stage of the flow.")
async def stage(run: ServedRun, body: api_schemas.StageBody) -> None:
    run.stage = body.model_dump()


# --- the data plane


@router.get("/healthz", "Check that the data plane answers.")
async def health(plane: DataPlane) -> Answer:
    return {"runs": len(plane.runs)}


@router.get("/openapi.json", "Get the OpenAPI document.")
async def openapi(request: Request) -> Answer:
    return make_document(request.app.routes)
