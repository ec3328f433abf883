"""Many more requests made from the OpenAPI document, in a file of their own: to collect them takes a second,
which the tiers of each day leave out (tests/tiers.py)."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.control.openapi import make_document
from tests.bad_input.openapi_cases import check
from tests.bench.dataplane.planes import ServedPlane

API = schemathesis.openapi.from_dict(make_document(make_app("key").routes))


@pytest.mark.nightly
@API.parametrize()
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_are_as_described_for_many_more_requests(
    case: schemathesis.Case, served: tuple[ServedPlane, str]
) -> None:
    check(case, *served)
