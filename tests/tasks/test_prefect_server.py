import asyncio
import itertools
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.server.api.server import create_app
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from tasks.prefect_server import MOST_BYTES, RefuseStrangers, RepeatRefused, RetryAfterMiddleware


async def answer(status: int) -> httpx.Response:
    transport = httpx.ASGITransport(RetryAfterMiddleware(PlainTextResponse("as it was", status)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        return await http.get("/")


async def test_a_client_that_met_a_locked_database_is_told_to_ask_again_soon() -> None:
    refused = await answer(503)
    assert float(refused.headers["Retry-After"]) <= 0.1
    assert refused.text == "as it was"


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_other_answers_stay_as_they_are(status: int) -> None:
    assert "Retry-After" not in (await answer(status)).headers


async def test_a_client_that_is_refused_again_and_again_is_told_later_times_until_it_was_not() -> None:
    clock = [100.0]
    app = RetryAfterMiddleware(PlainTextResponse("as it was", 503), now=lambda: clock[0])

    async def told() -> float:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            return float((await http.get("/")).headers["Retry-After"])

    waits = []
    # the retries of Prefect's client
    for _ in range(5):
        waits.append(await told())
        clock[0] += waits[-1]
    assert waits == sorted(waits) and sum(waits) > 5
    for _ in range(50):
        clock[0] += await told()
    assert await told() == 10.0
    clock[0] += 31
    assert await told() == 0.1


class Locked:
    """An application that answers by 503 so many times, and then with the body of the request."""

    def __init__(self, refusals: float) -> None:
        self.refusals = refusals
        self.asked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        body = await Request(scope, receive).body()
        is_refused = self.asked <= self.refusals
        await PlainTextResponse("locked" if is_refused else body, 503 if is_refused else 201)(
            scope, receive, send
        )


async def repeated(app: Locked, method: str = "POST", body: bytes = b"a run") -> httpx.Response:
    """The answer to this request, with a clock on which every look takes 5 s."""
    repeating = RepeatRefused(app, now=itertools.count(0.0, 5.0).__next__)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(repeating), base_url="http://server") as http:
        return await http.request(method, "/api/flow_runs/", content=body)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.prefect_server.PAUSE_S", 0.0)


@pytest.mark.usefixtures("impatient")
async def test_a_request_that_meets_a_locked_database_is_repeated_with_its_body() -> None:
    app = Locked(refusals=3)
    answered = await repeated(app)
    assert (answered.status_code, answered.text, app.asked) == (201, "a run", 4)


@pytest.mark.usefixtures("impatient")
async def test_a_database_that_stays_locked_is_told_in_words() -> None:
    app = Locked(refusals=math.inf)
    refused = await repeated(app)
    told = (
        "the database of the Prefect server is still busy after 20 s, and nothing was changed: repeat the "
        "request; if this happens often, use PostgreSQL (PREFECT_API_DATABASE_CONNECTION_URL)"
    )
    assert (refused.status_code, refused.json()["detail"], app.asked) == (503, told, 5)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("method", "size"), [("GET", 0), ("POST", MOST_BYTES + 1)])
async def test_what_changes_nothing_or_is_large_is_not_repeated(method: str, size: int) -> None:
    app = Locked(refusals=1)
    assert (await repeated(app, method, bytes(size))).text == "locked"
    assert app.asked == 1


async def test_a_run_is_submitted_although_the_database_changes_under_the_request(database: Path) -> None:
    """A transaction of SQLite that has read before another one writes cannot write any more."""
    app = create_app(ephemeral=True, ignore_cache=True)
    app.add_middleware(RepeatRefused)
    async with PrefectClient(app) as client:
        flow = await client.create_flow_from_name("train")
        deployment = await client.create_deployment(flow, "quickstart")
        with closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("UPDATE flow SET name = 'changed'")
            # meanwhile the request reads, and waits to write
            asyncio.get_running_loop().call_later(2.0, other.execute, "COMMIT")
            # like a browser, this client does not repeat a request
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                submitted = await client.create_flow_run_from_deployment(deployment)
    assert submitted.deployment_id


@pytest.mark.usefixtures("database")
async def test_the_installed_fastapi_takes_what_prefects_client_sends() -> None:
    """`prefect deploy` reads the workers of a pool; from fastapi 0.151 on, that is answered by status 422."""
    app = create_app(ephemeral=True, ignore_cache=True)
    async with PrefectClient(app) as client:
        await client.create_work_pool(WorkPoolCreate(name="sf", type="process"))
        assert list(await client.read_workers_for_work_pool("sf")) == []


OWN = "127.0.0.1:4200"
FURTHER = ["http://server:4200/api", "https://prefect.example.com", "10.0.0.7:8443", "*", ""]
NAVIGATION = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


async def guarded(path: str, **headers: str) -> httpx.Response:
    """The answer of a server at 10.0.0.1 to a request with these headers."""
    app = RefuseStrangers(PlainTextResponse("served"), FURTHER)

    async def at_its_address(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "server": ("10.0.0.1", 4200)}, receive, send)

    transport = httpx.ASGITransport(at_its_address)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{OWN}") as http:
        return await http.get(path, headers=given)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:4200", "127.8.0.9", "localhost:9", "LOCALHOST", "[::1]:4200", "10.0.0.1:4200", "server:80"]
    + ["prefect.example.com", "10.0.0.7", "Prefect.Example.com:443"],
)
async def test_loopback_its_own_address_and_configured_hosts_are_served(host: str) -> None:
    served = await guarded("/api/deployments/filter", host=host)
    assert (served.text, served.headers["X-Frame-Options"]) == ("served", "SAMEORIGIN")


@pytest.mark.parametrize(
    "host",
    ["evil.test:4200", "127.0.0.1.evil.test", "localhost.evil.test", "10.0.0.2:4200", "example.com", "*", ""]
    + ["[::1", "127.0.0.1@evil.test", "evil.test:", "0x7f.1", "prefect.example.com.evil.test"],
)
async def test_other_hosts_are_refused_in_one_sentence(host: str) -> None:
    refused = await guarded("/", host=host)
    said = refused.json()["detail"]
    assert refused.status_code == 403
    assert said.startswith("this Prefect server does not serve the host '")
    assert said.endswith("start it with this host in the environment variable SF_ALLOWED_HOSTS")


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (f"http://{OWN}", OWN),
        ("http://localhost:4200", "localhost:4200"),
        # a tunnel to another port
        ("http://localhost:9000", "localhost:9000"),
        # proxies with TLS, of which the second names the server itself as host
        ("https://prefect.example.com", "prefect.example.com"),
        ("https://prefect.example.com", OWN),
        ("http://10.0.0.7:8443", "10.0.0.7:8443"),
    ],
)
async def test_pages_of_the_ui_are_served(origin: str, host: str) -> None:
    assert (
        await guarded("/api/flow_runs/", host=host, origin=origin, sec_fetch_site="same-origin")
    ).is_success


@pytest.mark.parametrize(
    "origin",
    ["http://evil.test", "http://127.0.0.1:3000", "http://localhost:3000", "http://127.0.0.1", "null", "*"]
    + ["file://", "https://prefect.example.com:444", "https://prefect.example.com.evil.test", "http://[::1"]
    + ["http://evil.test/127.0.0.1:4200", f"http://{OWN}@evil.test", f"http://evil.test@{OWN}"],
)
async def test_pages_of_other_origins_are_refused_in_one_sentence(origin: str) -> None:
    for site in ("none", "same-origin", "same-site", "cross-site"):
        refused = await guarded("/api/flow_runs/", origin=origin, sec_fetch_site=site, **NAVIGATION)
        said = refused.json()["detail"]
        assert refused.status_code == 403
        assert said.startswith(f"pages of {origin} may not use this Prefect server; ")
        assert said.endswith("the address in the environment variable SF_ALLOWED_HOSTS")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_requests_of_other_sites_are_refused_without_an_origin_too(site: str) -> None:
    for mode, dest in (
        ("no-cors", "image"),
        ("no-cors", "script"),
        ("navigate", "iframe"),
        ("cors", "empty"),
    ):
        headers = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest}
        said = (await guarded("/runs", **headers)).json()["detail"]
        assert (
            said == "pages of other origins may not use this Prefect server; they may link to pages of its UI"
        )


async def test_a_link_opens_a_page_of_the_ui_but_nothing_of_the_api() -> None:
    assert (await guarded("/runs/flow-run/1", **NAVIGATION)).is_success
    assert (await guarded("/api/csrf-token", **NAVIGATION)).status_code == 403
    assert (await guarded("/api/csrf-token", **NAVIGATION | {"sec-fetch-site": "none"})).is_success


def test_websockets_are_refused_like_requests() -> None:
    async def accept(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})

    client = TestClient(RefuseStrangers(accept, FURTHER))
    for headers in ({"host": OWN}, {"host": OWN, "origin": f"http://{OWN}"}):
        with client.websocket_connect("/api/events/in", headers=headers):
            pass
    for headers in (
        {"host": OWN, "origin": "http://evil.test"},
        {"host": OWN, "origin": "null"},
        {"host": "evil"},
    ):
        with pytest.raises(WebSocketDisconnect) as refused:
            client.websocket_connect("/api/events/in", headers=headers).__enter__()
        assert refused.value.code == 1008 and "this Prefect server" in refused.value.reason
