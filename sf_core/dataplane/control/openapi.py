"""The OpenAPI 3.1 document of the control routes, at /openapi.json: what each accepts and answers.

It follows from how they are declared. Agents' routes are described by those whose APIs they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from starlette.routing import BaseRoute

from sf_core.dataplane.api_schemas import MAX_INDEX
from sf_core.dataplane.control.control_route import JSON, ControlRoute
from sf_core.dataplane.gateway.dialects.registry import is_for_clients

Schema = dict[str, Any]

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
    400: "The request is invalid. The message names the cause.",
    401: "The key is missing or wrong.",
    403: "The request shows no valid key, and a web page can have sent it. The message names the cause.",
    404: "An object that the path or the body names does not exist.",
    405: "The path does not support this method.",
    409: "The request conflicts with the state of the run.",
    413: "The body is too large.",
    429: "Memory is full. Retry after the time in Retry-After.",
    503: "The request cannot be served now. Retry after the time in Retry-After.",
}


def make_document(routes: Iterable[BaseRoute]) -> Schema:
    """The document of the control routes among these."""
    components: dict[str, Schema] = {}
    paths: dict[str, Schema] = {}
    for route in routes:
        if isinstance(route, ControlRoute):
            path = re.sub(r":\w+}", "}", route.path)
            paths.setdefault(path, {})[route.method.lower()] = _describe(route, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "SeamlessFlow data plane", "version": "1"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _KEYS},
        "security": _accept(_KEYS),
    }


_KEYS: Schema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_INDEX: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_INDEX}
_NAME: Schema = {"type": "string", "minLength": 1}
_WAIT_S: Schema = {"name": "wait_s", "in": "query", "schema": {"type": "number", "minimum": 0}}


def _describe(route: ControlRoute, components: dict[str, Schema]) -> Schema:
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": _INDEX if name == "index" else _NAME}
        for name in route.param_convertors
    ]
    statuses = {400, 401, 403, 405, *route.refusals}
    statuses |= {404} if parameters else set()
    statuses |= {413} if "body" in route.parameters else set()
    statuses |= {409, 503} if route.recorded or route.confirmed else set()
    answer: Schema = {route.media_type: {"schema": {"type": "object"}} if route.media_type == JSON else {}}
    described: Schema = {
        "summary": route.summary,
        "parameters": parameters + [_WAIT_S] * ("wait_s" in route.parameters),
        "responses": {"200": {"description": "Done.", "content": answer}}
        | {str(code): _refusal(code) for code in sorted(statuses)},
    }
    if is_for_clients(route.path):
        described["security"] = [{}, *_accept(_KEYS)]
    if "body" in route.parameters:
        content = {JSON: {"schema": _body(route.parameters["body"], components)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _accept(keys: Schema) -> list[Schema]:
    """Each of these keys opens a route by itself."""
    return [{name: []} for name in keys]


def _refusal(status: int) -> Schema:
    # clients that identify as Anthropic's SDK get `type` beside `error`
    return {"description": REFUSALS[status], "content": {JSON: {"schema": _ERROR}}}


def _body(body: type[BaseModel], components: dict[str, Schema]) -> Schema:
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    components |= schema.pop("$defs", {})
    components[body.__name__] = schema
    return {"$ref": f"#/components/schemas/{body.__name__}"}
