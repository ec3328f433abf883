"""A check of one request that is made from the OpenAPI document of the control routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.bench.dataplane import planes
from tests.bench.refusals import check_sentence
from tests.bench.waits import patience

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def check(case: schemathesis.Case, plane: planes.ServedPlane, session_id: str) -> None:
    """Check one case; half of them name existing things, or all would be refused for the same reason."""
    name_what_is_there(case, plane.run_dir, plane.model_dir, session_id)
    headers = planes.operator_headers(plane.url)
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
