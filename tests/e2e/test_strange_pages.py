"""Pages of other origins in a real browser, which try to use the servers that listen on loopback here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import httpx
import psutil
import pytest
from distributed import Client
from playwright.sync_api import Browser, expect
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from sf_core.cli.stack.local import free_port, local_stack
from sf_core.cli.stack.processes import Part
from tests import bench
from tests.e2e import strangers
from tests.e2e.prefect_ui import prefect_ui

TOKEN_THEN_POST = """async ([url, body]) => {
    const api = url.replace(/[/]api[/].*/, "/api")
    const {token} = await (await fetch(api + "/csrf-token?client=evil")).json()
    const type = "application/json"
    const headers = {"Prefect-Csrf-Client": "evil", "Prefect-Csrf-Token": token, "content-type": type}
    return await (await fetch(url, {method: "POST", headers, body})).text()
}"""
COMMAND = {"environment": {"agent": {"command": ["touch", "/tmp/a=b"]}}}
STOLEN = json.dumps({"name": "stolen=run", "parameters": {"config": COMMAND}})


@pytest.fixture(scope="module")
def strange_port() -> Iterator[int]:
    with strangers.stranger() as port:
        yield port


# --- Prefect


def deployment_id(server: bench.stacks.prefect_server.Server) -> UUID:
    with server.client() as client:
        return client.read_deployment_by_name(bench.stacks.prefect_server.DEPLOYMENTS["train"]).id


def runs(server: bench.stacks.prefect_server.Server) -> list[FlowRun]:
    chosen = DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id(server)]))
    with server.client() as client:
        return client.read_flow_runs(deployment_filter=chosen)


@pytest.mark.parametrize("name", strangers.NAMES)
def test_a_page_of_another_origin_neither_reads_deployments_nor_starts_a_run(
    server: bench.stacks.prefect_server.Server, browser: Browser, strange_port: int, name: str
) -> None:
    before = runs(server)
    deployments = f"{server.api}/deployments"
    with strangers.page_at(browser, f"http://{name}:{strange_port}/") as page:
        for what, way in (strangers.POSTS | {"JSON with a token": TOKEN_THEN_POST}).items():
            said = strangers.send(page, way, f"{deployments}/{deployment_id(server)}/create_flow_run", STOLEN)
            assert runs(server) == before, what
            assert "stolen" not in said
            said = strangers.send(page, way, f"{deployments}/filter", '{"offset": 0, "note": "="}')
            assert "quickstart" not in said, what
        for what, way in strangers.GETS.items():
            assert "quickstart" not in strangers.send(page, way, f"{deployments}/name/train/quickstart"), what
            assert "PREFECT" not in strangers.send(page, way, f"{server.api}/admin/settings"), what


def test_a_page_of_another_origin_opens_no_websocket(
    server: bench.stacks.prefect_server.Server, browser: Browser, strange_port: int
) -> None:
    base = server.api.replace("http", "ws", 1)
    paths = ("events/in", "events/out", "logs/out", "task_runs/subscriptions/scheduled")
    sockets = [f"{base}/{path}" for path in (*paths, "work_pools/sf/workers/connect")]
    for name in strangers.NAMES:
        with strangers.page_at(browser, f"http://{name}:{strange_port}/") as page:
            assert [page.evaluate(strangers.SOCKET, [url, "{}"]) for url in sockets] == ["refused"] * len(
                sockets
            )
    with strangers.page_at(browser, server.api.removesuffix("/api")) as page:
        assert page.evaluate(strangers.SOCKET, [sockets[0], ""]) == "open"


def test_a_page_of_another_origin_shows_no_frame_of_the_ui_but_may_link_to_it(
    server: bench.stacks.prefect_server.Server, browser: Browser, strange_port: int
) -> None:
    ui = server.api.removesuffix("/api")
    with strangers.page_at(browser, f"http://evil.test:{strange_port}/") as page:
        with page.expect_response(f"{ui}/deployments") as framed:
            page.evaluate(
                "src => document.body.append(Object.assign(document.createElement('iframe'), {src}))",
                f"{ui}/deployments",
            )
        assert framed.value.status == 403
        page.evaluate(
            "href => document.body.append(Object.assign(document.createElement('a'), {href, text: 'runs'}))",
            f"{ui}/deployments",
        )
        page.get_by_text("runs").click()
        expect(page.get_by_text("quickstart").first).to_be_visible()


def test_a_name_that_was_rebound_to_this_machine_is_refused(
    server: bench.stacks.prefect_server.Server, browser: Browser
) -> None:
    before = runs(server)
    refusal = "this Prefect server does not serve the host 'evil.test'"
    base = f"http://evil.test:{urlsplit(server.api).port}"
    with strangers.rebound_page(browser, server.api) as page:
        expect(page.get_by_text(refusal)).to_be_visible()
        assert refusal in strangers.send(page, strangers.GETS["CORS"], f"{base}/api/csrf-token?client=evil")
        assert refusal in strangers.send(page, strangers.POST_JSON, f"{base}/api/deployments/filter", "{}")
        create = f"{base}/api/deployments/{deployment_id(server)}/create_flow_run"
        for way in (strangers.POST_JSON, TOKEN_THEN_POST):
            strangers.send(page, way, create, STOLEN)
        socket = f"{base.replace('http', 'ws', 1)}/api/events/in"
        assert page.evaluate(strangers.SOCKET, [socket, "{}"]) == "refused"
    assert runs(server) == before


def test_a_preflight_of_another_origin_allows_nothing(server: bench.stacks.prefect_server.Server) -> None:
    asked = {
        "Origin": "https://evil.test",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,prefect-csrf-token",
        "Access-Control-Request-Private-Network": "true",
    }
    answer = httpx.options(f"{server.api}/deployments/filter", headers=asked)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control-")]


# the UI is used at one name in test_browser.py, and at a configured one below
@pytest.mark.nightly
def test_the_ui_works_at_both_names_of_loopback(
    server: bench.stacks.prefect_server.Server, browser: Browser
) -> None:
    port = urlsplit(server.api).port
    for name in ("127.0.0.1", "localhost"):
        with prefect_ui(browser, f"http://{name}:{port}/api") as ui:
            ui.open_form(deployment_id(server))
            # Prefect's newer UI, which a browser gets that asks for no page
            ui.page.goto(f"http://{name}:{port}/v2/deployments")
            expect(ui.page.get_by_text("quickstart").first).to_be_visible()


def test_a_server_behind_another_name_serves_its_ui_once_the_name_is_configured(
    browser: Browser, tmp_path: Path
) -> None:
    port = free_port()
    env = {
        "PREFECT_HOME": bench.stacks.prefect_home.make_prefect_home(tmp_path / "prefect"),
        "PREFECT_UI_API_URL": f"http://ui.test:{port}/api",
        "SF_ALLOWED_HOSTS": f"api.test, gpu1:{port}",
    }
    command = [sys.executable, "-m", "sf_core", "server", "--port", str(port)]
    with local_stack(tmp_path / "logs", env) as stack:
        [process] = stack.start(Part("server", command))
        stack.await_ready(process, lambda: status_at(port, "127.0.0.1"), bench.waits.patience())
        hosts = ("localhost", "api.test", "gpu1", "ui.test", "evil.test")
        assert [status_at(port, host) for host in hosts] == [200, 200, 200, 200, 403]
        with bench.pages.new_page(browser) as page:
            with page.expect_response(lambda answer: answer.request.method == "POST") as posted:
                page.goto(f"http://ui.test:{port}/deployments")
            assert posted.value.ok and posted.value.url.startswith(f"http://ui.test:{port}/api/")


def status_at(port: int, host: str) -> int:
    """Status of the answer to a client that calls the server by this host; 0 without an answer."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/api/health", headers={"Host": host}).status_code
    except httpx.HTTPError:
        return 0


def test_the_documented_calls_of_the_prefect_page_work(server: bench.stacks.prefect_server.Server) -> None:
    page = (bench.ROOT / "docs" / "guides" / "clusters" / "prefect-ui.md").read_text(encoding="utf-8")
    [block] = [text for text in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "curl" in text]
    env = server.env | {"PREFECT_API_URL": server.api}

    def call(script: str) -> str:
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=bench.waits.patience(), encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first, rest = block.split("\n", 1)
    deployment = json.loads(call(first))
    made = json.loads(call(rest.replace("/ID/", f"/{deployment['id']}/")))
    assert made["parameters"] == {"config": {"run_id": "longer", "train": {"iterations": 80}}}
    with server.client() as client:
        client.delete_flow_run(UUID(made["id"]))


# --- Dask


def test_dasks_http_servers_have_no_pages_that_a_rebound_name_could_read(
    cluster: bench.stacks.cluster.Cluster,
) -> None:
    with Client(cluster.services.scheduler, set_as_default=False) as client:
        scheduler = client.scheduler_info(n_workers=-1)
    services = [scheduler, *scheduler["workers"].values()]
    ports = [server["services"]["dashboard"] for server in services]
    assert len(ports) > 1
    for port in ports:
        for path in ("/info/main/logs.html", "/json/identity.json", "/metrics", "/health", "/eventstream"):
            answer = httpx.get(f"http://127.0.0.1:{port}{path}", headers={"Host": "evil.test"})
            assert answer.status_code == 404, path


def test_every_process_listens_on_loopback_only(cluster: bench.stacks.cluster.Cluster) -> None:
    processes = psutil.Process().children(recursive=True)
    found = {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    ports = [urlsplit(url).port for url in (cluster.services.scheduler, cluster.services.dataplane)]
    assert {port for _, port in found} >= set(ports)
    assert {ip for ip, _ in found} <= {"127.0.0.1", "::1"}


# --- the data plane

CHAT = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "1+1=?"}]})


def attacks(plane: bench.dataplane.planes.ServedPlane) -> dict[str, str]:
    """Bodies by paths: what loopback may do without a key, and what changes a run."""
    places = {"run_id": "stolen", "run_dir": f"{plane.run_dir}/a=b", "model_dir": plane.model_dir}
    return {
        "/v1/chat/completions": CHAT,
        "/sessions": json.dumps({"run_id": "run", "task_id": "1+1="}),
        "/runs": json.dumps(bench.dataplane.specs.SPEC | places),
        "/runs/run/pause": "",
        "/runs/run/release": "",
    }


def check_untouched(plane: bench.dataplane.planes.ServedPlane) -> None:
    status = plane.get("/runs/run")
    assert [engine["id"] for engine in status["engines"]] and not (status["paused"] or status["released"])
    assert (status["sessions_running"], plane.asked) == (0, [])
    assert plane.http.get("/runs/stolen").status_code == 404


@pytest.mark.parametrize("name", strangers.NAMES)
def test_a_page_of_another_origin_uses_nothing_of_the_data_plane(
    answering_plane: bench.dataplane.planes.ServedPlane, browser: Browser, strange_port: int, name: str
) -> None:
    plane = answering_plane
    with strangers.page_at(browser, f"http://{name}:{strange_port}/") as page:
        for path, body in attacks(plane).items():
            for way in strangers.POSTS.values():
                strangers.send(page, way, plane.url + path, body)
                check_untouched(plane)
        for way in strangers.GETS.values():
            for path in ("/runs/run", "/metrics", "/v1/models"):
                said = strangers.send(page, way, plane.url + path)
                assert "policy" not in said and "# HELP" not in said
        assert (
            page.evaluate(strangers.SOCKET, [plane.url.replace("http", "ws", 1) + "/engines", "{}"])
            == "refused"
        )


def test_a_name_that_was_rebound_to_this_machine_is_refused_by_the_data_plane(
    answering_plane: bench.dataplane.planes.ServedPlane, browser: Browser
) -> None:
    plane = answering_plane
    base = f"http://evil.test:{urlsplit(plane.url).port}"
    with strangers.rebound_page(browser, plane.url) as page:
        for path, body in attacks(plane).items():
            strangers.send(page, strangers.POST_JSON, base + path, body)
            check_untouched(plane)
        assert "policy" not in strangers.send(page, strangers.GETS["CORS"], f"{base}/runs/run")
        assert (
            page.evaluate(strangers.SOCKET, [base.replace("http", "ws", 1) + "/engines", "{}"]) == "refused"
        )


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.test"},
        {"Origin": "http://evil.test"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
    ],
    ids=lambda headers: ": ".join(*headers.items()),
)
def test_a_request_without_a_key_that_a_page_may_have_made_is_refused_by_the_data_plane(
    answering_plane: bench.dataplane.planes.ServedPlane, headers: dict[str, str]
) -> None:
    for path, body in attacks(answering_plane).items():
        given = {"Content-Type": "application/json", **headers}
        refused = httpx.post(answering_plane.url + path, content=body, headers=given)
        assert refused.is_client_error, (path, refused.text)
    check_untouched(answering_plane)


def test_programs_on_loopback_take_turns_without_a_key(
    answering_plane: bench.dataplane.planes.ServedPlane,
) -> None:
    for headers in (
        {},
        {"Host": "localhost"},
        {"Origin": answering_plane.url, "Sec-Fetch-Site": "same-origin"},
    ):
        given = {"Content-Type": "application/json", **headers}
        answer = httpx.post(f"{answering_plane.url}/v1/chat/completions", content=CHAT, headers=given)
        assert answer.is_success, answer.text


def test_with_a_key_the_data_plane_asks_for_nothing_else() -> None:
    with bench.dataplane.planes.running_app(key="the-operators") as url:
        for headers in ({"Host": "llm.example.com"}, {"Origin": "https://llm.example.com"}):
            given = {"Authorization": "Bearer the-operators", **headers}
            assert httpx.get(f"{url}/metrics", headers=given).is_success
            assert httpx.get(f"{url}/metrics", headers=headers).is_client_error


def test_an_engine_needs_the_operators_key(answering_plane: bench.dataplane.planes.ServedPlane) -> None:
    with pytest.raises(InvalidStatus), connect(answering_plane.url.replace("http", "ws", 1) + "/engines"):
        pass
