"""The OpenAPI 3.1 document of the control routes, at /openapi.json: what each accepts and answers.

Owns the descriptions of routes. Paths are those of the routes themselves, bodies those of bodies.py. A route
without a description makes the document fail. Agents' routes below /v1 are described by those whose APIs they
are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.routing import BaseRoute, Route

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
from sf_core.dataplane.control.arrow_stream import MEDIA_TYPE

Schema = dict[str, Any]

JSON, TEXT = "application/json", "text/plain"


@dataclass(frozen=True, slots=True)
class Operation:
    summary: str
    body: type[BaseModel] | None = None
    refusals: tuple[int, ...] = ()
    """Error statuses beside those that follow from the path and the body."""
    answers: tuple[str, ...] = (JSON,)
    waits: bool = False
    """Whether it takes wait_s, the longest wait in seconds."""


_SESSION, _RUN = "/sessions/{session_id}", "/runs/{run_id}"
_BATCH, _EVALUATION = _RUN + "/batches/{index}", _RUN + "/evaluations/{index}"

OPERATIONS = {
    "POST /sessions": Operation("Open a session for an agent of one's own.", SessionBody, (404, 429, 503)),
    f"GET {_SESSION}": Operation("Its turn tree.", refusals=(503,)),
    f"POST {_SESSION}/reward": Operation("Give it a reward before it is over.", RewardBody, (503,)),
    f"POST {_SESSION}/finish": Operation("End it.", FinishBody, (503,)),
    f"POST {_RUN}/finished": Operation("End several sessions.", FinishedBody, (503,)),
    "POST /runs": Operation("Register a run, or begin another attempt on it.", RunSpec, (409, 503)),
    f"GET {_RUN}": Operation("What goes on in the run."),
    f"POST {_RUN}/claim": Operation("Take sessions for a runner's agents.", ClaimBody, (503,)),
    f"GET {_BATCH}": Operation("How far the batch is.", waits=True),
    f"GET {_BATCH}/stream": Operation(
        "The batch's trajectories once it is sealed, as an Arrow stream.",
        refusals=(409, 503),
        answers=(MEDIA_TYPE,),
        waits=True,
    ),
    f"POST {_BATCH}/seal": Operation("Write the batch into the run directory.", SealBody, (409, 503)),
    f"POST {_EVALUATION}": Operation("Evaluate this policy version.", EvaluationBody, (409, 503)),
    f"GET {_EVALUATION}": Operation("How far the evaluation is.", waits=True),
    f"POST {_EVALUATION}/seal": Operation("Write it into the run directory.", SealBody, (409, 503)),
    f"POST {_RUN}/weights": Operation("Publish a policy version to every engine.", WeightsBody, (409, 503)),
    f"POST {_RUN}/leases/{{lease_id}}/revoke": Operation("Take its engine away.", RevokeBody, (503,)),
    f"POST {_RUN}/pause": Operation("Keep engines from sampling.", PauseBody, (503,)),
    f"POST {_RUN}/resume": Operation("Let them sample again.", ResumeBody, (503,)),
    f"POST {_RUN}/engines/{{engine_id}}/drain": Operation(
        "Let an engine end its turns and go.", refusals=(503,)
    ),
    f"POST {_RUN}/runners/{{runner}}/retire": Operation("Give a runner nothing new."),
    f"POST {_RUN}/runners/{{runner}}/alive": Operation("A runner lives: its sessions stay its own."),
    f"POST {_RUN}/release": Operation("The flow is over: runners and engines go.", ReleaseBody, (503,)),
    f"POST {_RUN}/stage": Operation("Say what the flow does now.", StageBody),
    "GET /healthz": Operation("Whether it answers."),
    "GET /metrics": Operation("Figures for Prometheus.", answers=(TEXT,)),
    "GET /openapi.json": Operation("This document."),
}
"""Descriptions by method and path."""

_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}

REFUSALS = {
    400: "The request is wrong; the sentence says what about it.",
    401: "The key is missing or wrong.",
    404: "What the path or the body names is not here.",
    405: "The path has no such method.",
    409: "It does not fit what the run has come to.",
    413: "The body is too long.",
    429: "Memory is full; Retry-After says when to come again.",
    503: "It cannot be done now; Retry-After says when to come again.",
}


def document(routes: Iterable[BaseRoute]) -> Schema:
    """The document of the control routes among these. Raises KeyError for one that is not described above."""
    components: dict[str, Schema] = {}
    paths: dict[str, Schema] = {}
    for route in routes:
        if isinstance(route, Route) and "/v1/" not in route.path:
            path = re.sub(r":\w+}", "}", route.path)
            for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
                operation = OPERATIONS[f"{method} {path}"]
                described = _describe(operation, list(route.param_convertors), components)
                paths.setdefault(path, {})[method.lower()] = described
    keys = {"bearer": {"type": "http", "scheme": "bearer"}}
    keys["x-api-key"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "SeamlessFlow data plane", "version": "1"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": keys},
        "security": [{}, *({name: []} for name in keys)],
    }


_INDEX: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_INDEX}
_NAME: Schema = {"type": "string", "minLength": 1}
_WAIT_S: Schema = {"name": "wait_s", "in": "query", "schema": {"type": "number", "minimum": 0}}


def _describe(operation: Operation, in_path: list[str], components: dict[str, Schema]) -> Schema:
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": _INDEX if name == "index" else _NAME}
        for name in in_path
    ]
    statuses = {400, 401, 405, *operation.refusals}
    statuses |= {404} if in_path else set()
    statuses |= {413} if operation.body is not None else set()
    described: Schema = {
        "summary": operation.summary,
        "parameters": parameters + [_WAIT_S] * operation.waits,
        "responses": {"200": _answer(operation)} | {str(code): _refusal(code) for code in sorted(statuses)},
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": _body(operation.body, components)}},
        }
    return described


def _answer(operation: Operation) -> Schema:
    content = {kind: {"schema": {"type": "object"}} if kind == JSON else {} for kind in operation.answers}
    return {"description": "Done.", "content": content}


def _refusal(status: int) -> Schema:
    # clients that identify as Anthropic's SDK get `type` beside `error`
    return {"description": REFUSALS[status], "content": {JSON: {"schema": _ERROR}}}


def _body(body: type[BaseModel], components: dict[str, Schema]) -> Schema:
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    components |= schema.pop("$defs", {})
    components[body.__name__] = schema
    return {"$ref": f"#/components/schemas/{body.__name__}"}
