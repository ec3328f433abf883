"""The control routes behave as their OpenAPI document says, tested by good and bad requests made from it."""

from __future__ import annotations

import re

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from starlette.routing import Route

from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.control.openapi import make_document
from sf_core.dataplane.gateway.dialects.registry import AGENTS_PATH
from tests.bad_input.openapi_cases import check
from tests.bench.dataplane import planes

API = schemathesis.openapi.from_dict(make_document(make_app("key").routes))
API.config.phases.coverage.enabled = False


def test_every_control_route_is_described_and_nothing_else(served: tuple[planes.ServedPlane, str]) -> None:
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
def test_answers_are_as_described(case: schemathesis.Case, served: tuple[planes.ServedPlane, str]) -> None:
    check(case, *served)
