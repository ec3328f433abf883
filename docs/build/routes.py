"""The page of the routes of the data plane, made from its OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.routing import Route

from docs.build.commands import escape
from docs.build.schemas import Schema, say_type
from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.control.openapi import REFUSALS, make_document
from sf_core.dataplane.gateway.dialects.registry import APIS, DIALECTS, is_for_clients

_TOP = """# Routes

This page lists the HTTP routes of the [data plane](../concepts/glossary.md#data-plane). The commands
`sf train`, `sf up` and `sf dataplane` start a data plane. The route `GET /openapi.json` returns the same
information as an OpenAPI 3.1 document.

## Keys

A request sends its key as `Authorization: Bearer KEY`, or in the header `x-api-key` or `x-goog-api-key`.

- **The operator's key** opens every route. `sf key` prints this key.
- **A run's key** opens sessions and groups of the run, and requests of agents outside of sessions. Clients
  can read, reward and finish the sessions that clients opened. If the run has no key and
  `SF_DATAPLANE_KEY` is not set, clients on the same machine need no key for these requests.
- **A session's key** opens the agents' routes of this session only. The response that opens a session
  contains this key. The agents of a run receive this key.

An agent names its [session](../concepts/glossary.md#session) in one of three ways:

- the path begins with `/sessions/SESSION`;
- the header `x-session-id` contains the id of the session;
- the key has the form `KEY:SESSION`.

## Errors

If a request fails, the response is JSON. The field `error.message` contains one sentence with the reason.

| status | meaning |
|---|---|
"""
_AGENTS = """
## Agents' routes

Agents call these routes with the SDK of the provider. The documentation of the provider describes the
bodies. Each route also exists below `/sessions/{session_id}`.

| API | routes |
|---|---|
"""


def routes_page() -> str:
    """Markdown of the page."""
    app = make_app("key-for-the-page")
    document = make_document(app.routes)
    routes = [(path, method, route) for path, of in document["paths"].items() for method, route in of.items()]
    lines = [f"| {status} | {escape(text)} |" for status, text in REFUSALS.items()]
    lines.append(_AGENTS.rstrip("\n"))
    apis = {
        type(dialect).__name__: [*dialect.paths, *(dialect.count.paths if dialect.count else ())]
        for dialect in DIALECTS
    }
    by_dialect = {path for paths in apis.values() for path in paths}
    answering = [
        route.path for route in app.routes if isinstance(route, Route) and route.path.startswith(APIS)
    ]
    apis["Models"] = [path for path in answering if path not in by_dialect]
    for api, paths in apis.items():
        method = "GET" if api == "Models" else "POST"
        shown = "<br>".join(f"`{method} {path.replace(':path', '')}`" for path in paths)
        lines.append(f"| {api} | {shown} |")
    groups = {
        "Sessions and groups": [route for route in routes if is_for_clients(route[0])],
        "Runs": [route for route in routes if route[0].startswith("/runs") and not is_for_clients(route[0])],
    }
    listed = [route for group in groups.values() for route in group]
    groups["The data plane"] = [route for route in routes if route not in listed]
    for title, group in groups.items():
        lines.append(f"\n## {title}\n")
        for path, method, route in group:
            lines += _show(path, method.upper(), route, document["components"]["schemas"])
    return _TOP + "\n".join(lines) + "\n"


def _show(path: str, method: str, route: Schema, schemas: Schema) -> Iterator[str]:
    yield f"\n### `{method} {path}`\n"
    yield escape(route["summary"]) + "\n"
    yield f"Key: {'the key of the run, or ' if is_for_clients(path) else ''}the operator's key.\n"
    if route["parameters"]:
        yield "Parameters:\n"
        for parameter in route["parameters"]:
            told = say_type(parameter["name"], parameter["schema"])
            yield f"- `{parameter['name']}` *(in the {parameter['in']}, {told})*"
        yield ""
    if "requestBody" in route:
        [content] = route["requestBody"]["content"].values()
        schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        about = escape(" ".join(schema.get("description", "").split()))
        yield f"Body (JSON){': ' + about if about else ':'}\n"
        yield from _fields(schema, schemas, "")
        yield ""
    [answer] = route["responses"]["200"]["content"]
    errors = ", ".join(status for status in route["responses"] if status != "200")
    yield f"Type of the response: `{answer}`. Statuses of errors: {errors}.\n"


def _fields(schema: Schema, schemas: Schema, indent: str) -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        told = say_type(name, field).replace("section", "object").replace("empty", "null")
        need = "required" if name in schema.get("required", ()) else "optional"
        text = escape(" ".join(field.get("description", "").split())).replace("None:", "null:")
        inner = field.get("items", field).get("$ref", "").rpartition("/")[2]
        if inner == "RunRollout":
            text = "The settings [`rollout`](settings.md#rollout)."
        yield f"{indent}- `{name}` *({told}, {need})*{': ' + text if text else ''}"
        if inner and inner != "RunRollout":
            yield from _fields(schemas[inner], schemas, indent + "    ")
