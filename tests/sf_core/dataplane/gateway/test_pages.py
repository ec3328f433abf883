"""Requests that a web page of another site may have sent: refused unless they show a valid key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.config.addresses import OwnAddresses
from sf_core.dataplane.gateway.access import explain_page
from tests.bench.dataplane import planes
from tests.bench.waits import patience

JSON = {"content-type": "application/json"}
BODY = b'{"run_id": "run"}'


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Iterator[planes.ServedPlane]:
    folder = Path(tmp_path_factory.mktemp("pages"))
    with (
        planes.running_app(allowed_hosts=("agents.internal",)) as url,
        planes.attended(url, folder, model_dir) as served,
    ):
        served.register()
        yield served


def send(plane: planes.ServedPlane, headers: dict[str, str], path: str = "/sessions") -> httpx.Response:
    with httpx.Client(base_url=plane.url, timeout=patience()) as http:
        return http.post(path, content=BODY, headers=headers)


@pytest.mark.parametrize(
    "headers",
    [
        JSON,
        {"content-type": "application/json; charset=utf-8"},
        {},
        {**JSON, "host": "localhost:8700"},
        {**JSON, "host": "[::1]:8700"},
        {**JSON, "host": "127.9.9.9"},
        {
            **JSON,
            "host": "localhost:8700",
            "origin": "http://localhost:8700",
            "sec-fetch-site": "same-origin",
        },
        {**JSON, "host": "agents.internal:8700"},
        {**JSON, "host": "agents.internal", "origin": "https://agents.internal"},
    ],
)
def test_programs_need_no_key_on_loopback(plane: planes.ServedPlane, headers: dict[str, str]) -> None:
    response = send(plane, headers)
    assert response.status_code == 200, response.text


FOREIGN = [
    ({**JSON, "host": "evil.test:8700"}, "only under a loopback name, not under 'evil.test'"),
    ({**JSON, "host": "127.0.0.1.evil.test"}, "not under '127.0.0.1.evil.test'"),
    ({**JSON, "host": "0.0.0.0:8700"}, "not under '0.0.0.0'"),
    ({**JSON, "host": "localhost:8700", "origin": "http://evil.test"}, "another origin (http://evil.test)"),
    ({**JSON, "host": "localhost:8700", "origin": "http://localhost:3000"}, "http://localhost:3000"),
    ({**JSON, "host": "localhost:8700", "origin": "null"}, "another origin (null)"),
    ({**JSON, "sec-fetch-site": "cross-site"}, "another origin (not named)"),
    ({**JSON, "sec-fetch-site": "same-site"}, "another origin (not named)"),
    ({"content-type": "text/plain"}, "application/json, not 'text/plain'"),
    ({"content-type": "application/x-www-form-urlencoded"}, "not 'application/x-www-form-urlencoded'"),
    ({"content-type": "multipart/form-data; boundary=x"}, "not 'multipart/form-data'"),
]


@pytest.mark.parametrize(("headers", "sentence"), FOREIGN)
def test_a_request_that_a_page_may_have_sent_is_refused_in_words(
    plane: planes.ServedPlane, headers: dict[str, str], sentence: str
) -> None:
    for key in ({}, {"authorization": "Bearer wrong"}):
        response = send(plane, headers | key)
        assert response.status_code == 403
        message = response.json()["error"]["message"]
        assert sentence in message
        assert "SF_ALLOWED_HOSTS" in message or "content-type: application/json" in message
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(("headers", "sentence"), FOREIGN)
def test_a_request_with_a_key_is_answered_whatever_its_headers_say(
    plane: planes.ServedPlane, headers: dict[str, str], sentence: str
) -> None:
    operator = str(plane.http.headers["authorization"])
    assert send(plane, headers | {"authorization": operator}).status_code == 200
    opened = send(plane, JSON).json()
    path = f"/sessions/{opened['session_id']}/v1/chat/completions"
    refusal = send(plane, headers | {"authorization": f"Bearer {opened['key']}"}, path)
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/runs", "/runs/run/release", "/runs/run/pause", "/runs/run/claim"])
def test_a_page_gives_no_orders(plane: planes.ServedPlane, path: str) -> None:
    for content_type in ("text/plain", "application/json"):
        assert send(plane, {"content-type": content_type}, path).status_code in (401, 403)
    assert not plane.get("/runs/run")["released"]


def test_a_preflight_allows_nothing(plane: planes.ServedPlane) -> None:
    asked = {
        "origin": "http://evil.test",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization",
        "access-control-request-private-network": "true",
    }
    with httpx.Client(base_url=plane.url) as http:
        for path in ("/sessions", "/v1/chat/completions", "/runs"):
            response = http.options(path, headers=asked)
            assert response.status_code >= 400
            assert not any(name.startswith("access-control-allow") for name in response.headers)


OURS = ("localhost", "127.0.0.1", "127.9.9.9", "[::1]", "named.test")
NAMED = "https://named.test"
JSON_TYPES = (None, "application/json", "application/x+json; a=b")
OTHERS = ("evil.test", "localhost.evil.test", "127.0.0.1.evil.test", "0.0.0.0", "[::]", "10.0.0.1", "")


@given(
    host=st.sampled_from(OURS + OTHERS),
    port=st.sampled_from(["", ":8700", ":80"]),
    origin=st.sampled_from(
        [None, "own", "null", "http://evil.test", "http://localhost:3000", "https://named.test"]
    ),
    site=st.sampled_from([None, "none", "same-origin", "same-site", "cross-site", "surprise"]),
    content_type=st.sampled_from(
        [None, "application/json", "application/x+json; a=b", "text/plain", "", "json"]
    ),
)
def test_what_passes_has_our_name_our_origin_and_json(
    host: str, port: str, origin: str | None, site: str | None, content_type: str | None
) -> None:
    if origin == "own":
        origin = f"http://{host}{port}"
    sent = {"host": host + port, "origin": origin, "sec-fetch-site": site, "content-type": content_type}
    # a named address is one with its port, or without
    is_named = origin in (NAMED, "http://named.test")
    is_own = origin in (None, f"http://{host}{port}") and site in (None, "none", "same-origin")
    passes = explain(sent) is None
    assert passes is (host in OURS and (is_named or is_own) and content_type in JSON_TYPES)


@given(
    st.dictionaries(
        st.sampled_from(["host", "origin", "sec-fetch-site", "content-type"]), st.text(max_size=30)
    )
)
def test_headers_of_any_form_are_judged(sent: dict[str, str]) -> None:
    fault = explain(dict(sent))
    assert fault is None or fault.endswith(".")


def explain(sent: dict[str, Any]) -> str | None:
    return explain_page({n: v for n, v in sent.items() if v is not None}, OwnAddresses(["named.test"]))
