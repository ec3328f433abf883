"""Services that variables, settings and options name, and that do not answer: refused before a start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from sf_core.cli.arguments import services
from sf_core.cli.arguments.services import DATA_PLANE, PREFECT, SCHEDULER, Service
from sf_core.cli.serving.app_thread import serve_app
from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.options import DataplaneOptions
from storage.run_directory import RunDirectory
from tests.bench import refusals, runs
from tests.bench.commands import sf

VARIABLES = ("PREFECT_API_URL", "SF_SCHEDULER", "SF_DATAPLANE_URL")
REFUSED = "nothing answers there ([Errno 111] Connection refused)"


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address at which nobody listens; none is named in the environment."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def stopped_run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(str(tmp_path / "r"))
    runs.configure(run, train={"iterations": 3}, storage={"root": str(tmp_path)})
    runs.pretend(run, 1, finished=False)
    return run


@pytest.mark.parametrize(
    ("variable", "address", "kind"),
    [
        ("PREFECT_API_URL", "http://{}/api", "Prefect server"),
        ("SF_DATAPLANE_URL", "http://{}", "data plane"),
        ("SF_SCHEDULER", "tcp://{}", "Dask scheduler"),
    ],
)
@pytest.mark.parametrize("command", ["resume", "evaluate", "train"])
def test_a_variable_that_nobody_answers_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
    stopped_run: RunDirectory,
    nobody: str,
    command: str,
    variable: str,
    address: str,
    kind: str,
) -> None:
    url = address.format(nobody)
    monkeypatch.setenv(variable, url)
    place = Path(stopped_run.uri)
    arguments = [command, str(place)]
    if command == "train":
        arguments = [command, "quickstart", "--set", "run_id=r", "--set", f"storage.root={place.parent}"]
    before = refusals.snapshot(place)
    code, output = sf(*arguments)
    told = f"error: {variable} names {url}, but {REFUSED}: start that {kind}, or unset {variable}"
    assert (code, output.endswith(told)) == (1, True), output
    assert command == "train" or output == told
    assert refusals.snapshot(place) == before


@pytest.mark.parametrize("setting", ["cluster.scheduler", "dataplane.url"])
def test_a_setting_that_nobody_answers_is_refused(
    stopped_run: RunDirectory, nobody: str, setting: str
) -> None:
    url = f"{'tcp' if setting == 'cluster.scheduler' else 'http'}://{nobody}"
    where = ["--set", "run_id=r", "--set", f"storage.root={Path(stopped_run.uri).parent}"]
    code, output = sf("train", "quickstart", *where, "--set", f"{setting}={url}")
    assert (code, f"error: {setting} names {url}, but {REFUSED}: start that" in output) == (1, True), output
    assert output.endswith(f", or correct {setting}")


def test_sf_plan_refuses_a_scheduler_that_nobody_answers(nobody: str) -> None:
    code, output = sf("plan", "quickstart", "--scheduler", f"tcp://{nobody}")
    told = f"error: --scheduler names tcp://{nobody}, but {REFUSED}: start that Dask scheduler, or correct"
    assert (code, output) == (2, f"{told} --scheduler")


def test_sf_setup_server_refuses_a_server_that_nobody_answers(
    monkeypatch: pytest.MonkeyPatch, nobody: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://me:secret@{nobody}/api")
    code, output = sf("setup-server")
    told = f"PREFECT_API_URL names http://{nobody}/api, but {REFUSED}: start that Prefect server, or correct"
    assert (code, output) == (2, f"error: {told} PREFECT_API_URL")


def test_a_service_that_accepts_and_never_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for kind in (PREFECT, DATA_PLANE):
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(ValueError, match=r"^NAME names .* nothing answers there \(timed out\)"):
                Service(kind, url, "NAME").check()
        Service(SCHEDULER, f"tcp://127.0.0.1:{silent.getsockname()[1]}", "NAME").check()


async def _answer(request: Request) -> Response:
    return JSONResponse(True)


async def _page(request: Request) -> Response:
    return HTMLResponse("a page for every path")


async def _fail(request: Request) -> Response:
    return Response("bad gateway", 502)


PREFECT_LIKE = [Route("/api/health", _answer), Route("/{path:path}", _page)]


@pytest.mark.parametrize(
    ("routes", "kind", "path", "fault"),
    [
        (PREFECT_LIKE, PREFECT, "/api", None),
        (PREFECT_LIKE, PREFECT, "/api/", None),
        (PREFECT_LIKE, PREFECT, "", "the server there has no Prefect API at this path (the address usually"),
        ([], PREFECT, "/api", "the server there has no Prefect API at this path (the address usually ends"),
        (PREFECT_LIKE, DATA_PLANE, "", "the server there is no data plane"),
        ([], DATA_PLANE, "", "the server there is no data plane"),
        ([Route("/{path:path}", _fail)], PREFECT, "/api", "the server there answers with status 502"),
        ([Route("/{path:path}", _fail)], DATA_PLANE, "", "the server there answers with status 502"),
    ],
)
def test_another_server_at_the_address_is_told(
    routes: list[Route], kind: str, path: str, fault: str | None
) -> None:
    with serve_app(Starlette(routes=routes)) as url:
        service = Service(kind, f"{url}{path}", "PREFECT_API_URL")
        if fault is None:
            return service.check()
        with pytest.raises(ValueError, match=r"^PREFECT_API_URL names ") as refused:
            service.check()
    refusals.check_sentence(str(refused.value), f"{url}{path}, but {fault}", f"start that {kind}, or unset")


def test_a_data_plane_answers_without_its_key() -> None:
    with serve_app(make_app("a-key", DataplaneOptions())) as url:
        Service(DATA_PLANE, url, "SF_DATAPLANE_URL").check()
        Service(DATA_PLANE, f"{url}/", "SF_DATAPLANE_URL").check()


@pytest.mark.parametrize("address", ["localhost:4200/api", "http://", "http://[::1", "nonsense"])
def test_what_is_no_address_is_refused_in_words(address: str) -> None:
    with pytest.raises(ValueError, match=r"^PREFECT_API_URL names ") as refused:
        Service(PREFECT, address, "PREFECT_API_URL").check()
    refusals.check_sentence(str(refused.value), address, "nothing answers there")
