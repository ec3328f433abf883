import asyncio
import os

import httpx
import openai
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

PLANE = os.environ["PLANE"]
RUN = os.environ["RUN"]
KEY = os.environ.get("SF_RUN_KEY", "none")

plane = httpx.AsyncClient(base_url=PLANE, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
policy = openai.AsyncOpenAI(base_url=f"{PLANE}/v1", api_key=KEY)


async def draft(question: str, base_url: str) -> str:
    client = policy.with_options(base_url=base_url)  # the same connections
    reply = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}]
    )
    return reply.choices[0].message.content or ""


async def ask(request: Request) -> JSONResponse:
    question = (await request.json())["question"]
    declared = await plane.post(f"/runs/{RUN}/groups", json={"task_id": question, "environment": "desk"})
    if declared.status_code in (409, 429):  # nothing trains here, or no batch has a place now: only answer
        return JSONResponse({"drafts": [{"id": None, "text": await draft(question, f"{PLANE}/v1")}]})
    if declared.is_error:  # the run has not begun, or is over: serve its policy by `sf serve`
        return JSONResponse(declared.json(), status_code=503)
    sessions = declared.json()["sessions"]
    texts = await asyncio.gather(*(draft(question, session["base_url"]) for session in sessions))
    for session in sessions:
        await plane.post(f"/sessions/{session['session_id']}/finish", json={"status": "answered"})
    drafts = [{"id": s["session_id"], "text": text} for s, text in zip(sessions, texts, strict=True)]
    return JSONResponse({"drafts": drafts})


async def rate(request: Request) -> JSONResponse:
    rating = await request.json()
    report = {"status": "finished", "reward": rating["stars"] / 5}
    told = await plane.post(f"/sessions/{rating['id']}/finish", json=report)
    return JSONResponse({}, status_code=told.status_code)


async def refuse(request: Request, error: Exception) -> JSONResponse:
    """The run has ended, or its data plane is away."""
    return JSONResponse({"error": str(error)}, status_code=503)


app = Starlette(
    routes=[Route("/ask", ask, methods=["POST"]), Route("/rate", rate, methods=["POST"])],
    exception_handlers={openai.APIError: refuse, httpx.TransportError: refuse},
)
