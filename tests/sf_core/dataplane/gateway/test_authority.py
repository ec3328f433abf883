"""Who may use which route: every route, every kind of key, on every kind of data plane."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route, WebSocketRoute
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.gateway.dialects.registry import GROUPS, SESSION, SESSIONS
from tests.bench.dataplane import planes
from tests.bench.waits import patience

OPERATOR = "key-of-the-operator"
RUN_KEYS = {"run": "key-of-this-run", "other": "key-of-another-run"}
TO_SEND = {"model": "policy"}
"""Of a turn, whose sender is checked before its prompt."""

REPORTS = {SESSION: None, f"{SESSION}/reward": {"reward": 1.0}, f"{SESSION}/finish": {"status": "finished"}}
"""The commands on sessions, with bodies."""

OPENED = [SESSIONS, GROUPS]


@dataclass
class Stand:
    """A data plane with two runs, and sessions of each origin in the first."""

    plane: planes.ServedPlane
    app: Starlette
    http: httpx.Client
    """A client that shows no key by itself."""
    is_locked: bool
    """Whether the operator's key was chosen by the user."""
    has_run_keys: bool
    claimed: dict[str, Any]
    of_operator: dict[str, Any]

    @property
    def has_open_runs(self) -> bool:
        """Whether clients need no key."""
        return not (self.is_locked or self.has_run_keys)

    def keys(self, session: dict[str, Any]) -> dict[str, str]:
        """The keys that a sender may show, by their kind."""
        # a runner that is silent loses its session
        self.plane.post("/runs/run/runners/a0/alive")
        return {
            "operator": OPERATOR,
            "run": RUN_KEYS["run"],
            "other run": RUN_KEYS["other"],
            "session": session["key"],
            "other session": (self.claimed if session is self.of_operator else self.of_operator)["key"],
            "wrong": "key-of-nobody",
            "none": "",
        }

    def is_client(self, kind: str) -> bool:
        return kind == "operator" or self.has_open_runs or (kind == "run" and self.has_run_keys)

    def send(self, key: str, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.http.request(method, path, json=body, headers=headers)

    def may(self, key: str, method: str, path: str, body: Any = None) -> bool:
        """Whether the sender of this key gets past the checks of keys."""
        response = self.send(key, method, path, body)
        if response.status_code in (401, 403):
            assert "Incorrect API key" in response.text, response.text
            return False
        return True


@contextmanager
def stand(folder: Path, model_dir: str, *, is_locked: bool, has_run_keys: bool) -> Iterator[Stand]:
    app = make_app(OPERATOR, welcomes_strangers=not is_locked)
    with (
        planes.serving(app) as url,
        planes.attended(url, folder, model_dir, OPERATOR) as plane,
        httpx.Client(base_url=url, timeout=patience()) as http,
    ):
        for name, key in RUN_KEYS.items():
            keys = {"key": key} if has_run_keys else {}
            plane.register(run_id=name, run_dir=str(folder / name), outside_groups=1, **keys)
        [claimed] = plane.claim()
        of_operator = plane.post("/sessions", {"run_id": "run"})
        yield Stand(plane, app, http, is_locked, has_run_keys, claimed, of_operator)


@pytest.fixture(
    scope="module",
    params=itertools.product((False, True), repeat=2),
    ids=lambda given: f"{'locked' if given[0] else 'default'}-{'run keys' if given[1] else 'no run key'}",
)
def each_stand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: str
) -> Iterator[Stand]:
    is_locked, has_run_keys = request.param
    folder = tmp_path_factory.mktemp("authority")
    with stand(folder, model_dir, is_locked=is_locked, has_run_keys=has_run_keys) as each:
        yield each


def routes_of(each: Stand) -> list[tuple[str, str]]:
    """Method and path of every HTTP route."""
    routes = [route for route in each.app.routes if isinstance(route, Route)]
    return [(method, route.path) for route in routes for method in (route.methods or set()) - {"HEAD"}]


def fill(path: str, run: str = "run", session: str = "") -> str:
    """A path with values for its parameters."""
    values = {"{run_id}": run, "{session_id}": session, "{index:int}": "0", "{model:path}": "policy"}
    values |= {"{lease_id}": "r0", "{engine_id:path}": "r0", "{runner:path}": "a0", "{model}": "policy"}
    for name, value in values.items():
        path = path.replace(name, value)
    assert "{" not in path, path
    return path


def is_of_agents(path: str) -> bool:
    return "/v1" in path


def test_the_operator_alone_uses_the_routes_of_flows_and_clusters(each_stand: Stand) -> None:
    own = [
        (method, path)
        for method, path in routes_of(each_stand)
        if not (is_of_agents(path) or path in OPENED or path in REPORTS)
    ]
    assert len(own) > 20
    for method, path in own:
        for kind, key in each_stand.keys(each_stand.claimed).items():
            # a run that is not there: the operator's request is to have no effect
            run = "nobody" if kind == "operator" else "run"
            is_allowed = each_stand.may(key, method, fill(path, run), {} if method == "POST" else None)
            assert is_allowed is (kind == "operator"), (method, path, kind)


def test_clients_open_sessions_and_take_turns_outside_of_them(each_stand: Stand) -> None:
    bodies: dict[str, Any] = {SESSIONS: {"run_id": "run"}, GROUPS: {"split": "holdout", "size": 1}}
    for method, path in routes_of(each_stand):
        if path not in OPENED and (path.startswith(SESSION) or not is_of_agents(path)):
            continue
        body = bodies.get(path, TO_SEND) if method == "POST" else None
        for kind, key in each_stand.keys(each_stand.claimed).items():
            is_allowed = each_stand.may(key, method, fill(path), body)
            if path in OPENED:
                assert is_allowed is each_stand.is_client(kind), (path, kind)
            else:
                # another run has the same model
                is_client = each_stand.is_client(kind) or (kind == "other run" and each_stand.has_run_keys)
                assert is_allowed is is_client, (path, kind)


@pytest.mark.parametrize("whose", ["claimed", "of_operator"])
def test_sessions_of_the_operator_are_reported_by_the_operator_alone(each_stand: Stand, whose: str) -> None:
    session = getattr(each_stand, whose)
    for kind, key in each_stand.keys(session).items():
        for path, body in REPORTS.items():
            if kind == "operator" and path.endswith("/finish"):
                continue  # it is needed
            method = "GET" if body is None else "POST"
            is_allowed = each_stand.may(key, method, fill(path, session=session["session_id"]), body)
            assert is_allowed is (kind == "operator"), (path, kind)


@pytest.mark.parametrize("whose", ["claimed", "of_operator"])
def test_agents_take_turns_in_their_own_session_alone(each_stand: Stand, whose: str) -> None:
    session = getattr(each_stand, whose)
    below = [one for one in routes_of(each_stand) if one[1].startswith(SESSION) and is_of_agents(one[1])]
    assert len(below) > 10
    for method, path in below:
        for kind, key in each_stand.keys(session).items():
            told = fill(path, session=session["session_id"])
            is_allowed = each_stand.may(key, method, told, TO_SEND if method == "POST" else None)
            assert is_allowed is (kind in ("operator", "session")), (path, kind)


def test_clients_own_what_clients_opened(each_stand: Stand) -> None:
    kinds = each_stand.keys(each_stand.claimed)
    for kind, key in kinds.items():
        for opener, opening_key in kinds.items():
            if opener == "operator" or not each_stand.is_client(opener):
                continue
            opened = each_stand.send(opening_key, "POST", "/sessions", {"run_id": "run"}).json()
            path = fill(SESSION, session=opened["session_id"])
            assert each_stand.may(opened["key"], "POST", path + "/v1/chat/completions", TO_SEND)
            may_hold = each_stand.is_client(kind)
            assert each_stand.may(key, "POST", path + "/v1/chat/completions", TO_SEND) is may_hold
            for route, body in REPORTS.items():
                method = "GET" if body is None else "POST"
                told = fill(route, session=opened["session_id"])
                assert each_stand.may(key, method, told, body) is may_hold, (route, kind, opener)


def test_the_key_of_a_session_reports_nothing(each_stand: Stand) -> None:
    for session in (each_stand.claimed, each_stand.of_operator):
        path = fill(SESSION, session=session["session_id"])
        forged = {"status": "finished", "reward": 1_000_000.0}
        if not each_stand.has_open_runs:
            assert not each_stand.may(session["key"], "POST", "/runs/run/groups", {})
        for name in ("x-api-key", "x-goog-api-key"):
            headers = {name: session["key"]}
            sent = each_stand.http.post(f"{path}/finish", json=forged, headers=headers)
            assert sent.status_code == 401
        in_query = f"{path}/finish?key={session['key']}"
        assert not each_stand.may("", "POST", in_query, forged)


def test_only_the_operator_connects_an_engine(each_stand: Stand) -> None:
    assert [route.path for route in each_stand.app.routes if isinstance(route, WebSocketRoute)] == [
        "/engines"
    ]
    address = each_stand.plane.url.replace("http", "ws") + "/engines"
    for kind, key in each_stand.keys(each_stand.claimed).items():
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if kind == "operator":
            connect(address, additional_headers=headers).close()
            with pytest.raises(InvalidStatus):
                connect(address, additional_headers=headers, origin="http://evil.test")  # type: ignore[arg-type]
            continue
        with pytest.raises(InvalidStatus):
            connect(address, additional_headers=headers)


def test_a_session_has_another_key_once_its_run_starts_over(tmp_path: Path, model_dir: str) -> None:
    keys = []
    for origin in ("first", "second"):
        with stand(tmp_path / origin, model_dir, is_locked=False, has_run_keys=False) as one:
            one.plane.register(run_id="new", run_dir=str(tmp_path / origin / "new"), origin=origin)
            [claimed] = one.plane.claim(run_id="new")
            keys.append((claimed["session_id"], claimed["key"]))
    assert keys[0][0] == keys[1][0] and keys[0][1] != keys[1][1]


def test_a_client_is_not_given_the_operators_group(tmp_path: Path, model_dir: str) -> None:
    with stand(tmp_path, model_dir, is_locked=False, has_run_keys=False) as one:
        asked = {"name": "mine", "size": 1}
        [own] = one.plane.post("/runs/run/groups", asked)["sessions"]
        answer = one.send("", "POST", "/runs/run/groups", asked)
        others = [session["session_id"] for session in answer.json().get("sessions", [])]
        assert own["session_id"] not in others


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "Bearer   ", ""])
def test_the_scheme_of_a_key_has_no_case(each_stand: Stand, scheme: str) -> None:
    for kind, key in each_stand.keys(each_stand.claimed).items():
        headers = {"Authorization": f"{scheme}{key}"} if key else {}
        answer = each_stand.http.get("/runs/run", headers=headers)
        assert (answer.status_code == 200) is (kind == "operator"), (scheme, kind)


def test_keys_are_compared_in_constant_time(each_stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def refuse(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return False

    monkeypatch.setattr("hmac.compare_digest", refuse)
    for key in (OPERATOR, RUN_KEYS["run"], each_stand.claimed["key"]):
        answer = each_stand.send(key, "GET", f"/sessions/{each_stand.claimed['session_id']}/v1/models")
        assert answer.status_code == 401 and (key.encode(), OPERATOR.encode()) in compared


def test_no_file_has_the_key_of_a_session(tmp_path: Path, model_dir: str) -> None:
    with stand(tmp_path, model_dir, is_locked=False, has_run_keys=True) as one:
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert any(one.claimed["session_id"].encode() in path.read_bytes() for path in files)
        for key in (one.claimed["key"], one.of_operator["key"], OPERATOR):
            assert [path for path in files if key.encode() in path.read_bytes()] == []
