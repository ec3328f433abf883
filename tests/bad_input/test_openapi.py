"""The control routes behave as their OpenAPI document says, tested by good and bad requests made from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.control.openapi import make_document
from sf_core.dataplane.gateway.dialects.registry import AGENTS_PATH
from tests.bench.dataplane.planes import ServedPlane, operator_headers
from tests.bench.refusals import check_sentence
from tests.patience import patience

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
API = schemathesis.openapi.from_dict(make_document(make_app("key").routes))
API.config.phases.coverage.enabled = False


def test_every_control_route_is_described_and_nothing_else(served: tuple[ServedPlane, str]) -> None:
    paths = served[0].get("/openapi.json")["paths"]
    described = {(path, method.upper()) for path, methods in paths.items() for method in methods}
    routes = [
        route
        for route in make_app("key").routes
        if isinstance(route, Route) and not AGENTS_PATH.match(route.path)
    ]
    served_methods = {
        (re.sub(r":\w+}", "}", route.path), method) for route in routes for method in route.methods or ()
    }
    assert described == {(path, method) for path, method in served_methods if method != "HEAD"}


@API.parametrize()
@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_described(case: schemathesis.Case, served: tuple[ServedPlane, str]) -> None:
    check(case, *served)


def check(case: schemathesis.Case, plane: ServedPlane, session_id: str) -> None:
    """Check one case; half of them name existing things, or all would be refused for the same reason."""
    name_what_is_there(case, plane.run_dir, plane.model_dir, session_id)
    headers = operator_headers(plane.url)
    response = case.call(base_url=plane.url, headers=headers, timeout=patience())
    checks = CHECKS
    if response.status_code == 503 and response.json()["error"].get("code") == "run_not_served":
        # no failure: a run of that name may be starting
        # schemathesis lowers the names, and lists the values
        [retry_after] = response.headers["retry-after"]
        assert int(retry_after) > 0
        checks = [check for check in CHECKS if check is not not_a_server_error]
    case.validate_response(response, checks=checks)
    if response.status_code >= 400 and response.request.method != "HEAD":
        check_sentence(response.json()["error"]["message"])


def name_what_is_there(case: schemathesis.Case, folder: Path, model_dir: str, session_id: str) -> None:
    there = {"run_id": "other", "session_id": session_id, "engine_id": "r0"}
    path: Any = case.path_parameters or {}
    for name in path.keys() & there.keys():
        if len(str(path[name])) % 2:
            path[name] = there[name]
    if "wait_s" in (case.query or {}):
        case.query["wait_s"] = "0"
    body = case.body
    if not isinstance(body, dict):
        return
    if case.operation.path == "/runs":
        places = {"run_dir": str(folder / "made"), "model_dir": model_dir, "served_model": "made"}
        body |= {name: value for name, value in places.items() if isinstance(body.get(name), str)}
    elif "wait_s" in body:
        body["wait_s"] = 0
    elif "run_id" in body and len(str(body["run_id"])) % 2:
        body["run_id"] = "other"
