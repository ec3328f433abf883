"""Two data planes on one run directory: what one of them acknowledges stays, and counts once."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.operator_key import account_key
from sf_core.dataplane.options import DataplaneOptions
from storage.files import is_local
from storage.run_directory import Attempt, RunDirectory
from tests.bench import dataplane, waits
from tests.bench.refusals import check_sentence


@contextlib.contextmanager
def process(folder: Path, model_dir: str, name: str, port: int = 0) -> Iterator[dataplane.planes.ServedPlane]:
    """A data plane in a process with a journal directory of its own, killed at the end."""
    options = ("--journal-dir", str(folder / name))
    with (
        dataplane.planes.running_process(folder / f"{name}.port", port, *options) as url,
        dataplane.planes.operator_client(url) as http,
    ):
        yield dataplane.planes.ServedPlane(url, http, folder, model_dir)


def pid_of(plane: dataplane.planes.ServedPlane) -> int:
    port = int(plane.url.rsplit(":", 1)[1])
    children = psutil.Process().children(recursive=True)
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    found = [child.pid for child in alive if any(c.laddr.port == port for c in child.net_connections())]
    return found[0]


def begin(plane: dataplane.planes.ServedPlane, renderer: Renderer, attempt: int, **changes: Any) -> None:
    """Register an attempt as a flow does, with an engine."""
    run = RunDirectory(changes.get("run_dir", str(plane.run_dir / "run")))
    assert run.begin_attempt(Attempt(dataplane=plane.url)) == attempt
    plane.register(attempt=attempt, **changes)
    plane.connect(dataplane.planes.answering(renderer, "yes"), f"r{attempt}", attempt=attempt)


def open_and_ask(plane: dataplane.planes.ServedPlane) -> str:
    """A session with a turn."""
    session_id = plane.post("/sessions", {"run_id": "run"})["session_id"]
    plane.post(f"/sessions/{session_id}/v1/chat/completions", dataplane.outside.HI)
    return str(session_id)


def refusal(plane: dataplane.planes.ServedPlane, path: str, body: Any) -> str:
    """Code and message of a refusal by 409."""
    response = plane.http.post(path, json=body)
    assert response.status_code == 409, response.text
    error = response.json()["error"]
    check_sentence(error["message"])
    return f"{error['code']}: {error['message']}"


def register_refused(plane: dataplane.planes.ServedPlane, **changes: Any) -> str:
    with pytest.raises(AssertionError) as refused:
        plane.register(**changes)
    return str(refused.value)


# --- a run directory on a disk with locks


def test_a_second_data_plane_is_refused_and_after_a_kill_it_has_all_that_was_acknowledged(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    run_dir = str(tmp_path / "run")
    with process(tmp_path, model_dir, "b") as second:
        with process(tmp_path, model_dir, "a") as first:
            begin(first, renderer, 1)
            with dataplane.outside.agents_at(first.url) as agents:
                agents.await_more()
                told = register_refused(second, attempt=2)
                for part in ("run_held", first.url, f"process {pid_of(first)} on ", "attempt 1", "end that"):
                    assert part in told
                agents.await_more()
            assert second.http.get("/runs/run").status_code == 404
        begin(second, renderer, 2)
        last = open_and_ask(second)
        second.post(f"/sessions/{last}/finish", dataplane.outside.END)
        dataplane.outside.await_stored(run_dir, [*agents.acknowledged, last])
        with process(tmp_path, model_dir, "a", int(first.url.rsplit(":", 1)[1])) as again:
            # the run was open when it was killed, and is another's now
            assert again.get("/healthz") == {"runs": 0}
            assert "superseded" in register_refused(again, attempt=1)
            open_and_ask(second)


def test_a_stopped_data_plane_keeps_its_run_and_goes_on_when_it_is_continued(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    with process(tmp_path, model_dir, "a") as first, process(tmp_path, model_dir, "b") as second:
        begin(first, renderer, 1)
        pid = pid_of(first)
        session_id = open_and_ask(first)
        with dataplane.outside.agents_at(first.url) as agents:
            agents.await_more()
            os.kill(pid, signal.SIGSTOP)
            try:
                # an agent whose deadline is over before it gets an answer
                with pytest.raises(httpx.ReadTimeout):
                    first.http.post(f"/sessions/{session_id}/finish", json=dataplane.outside.END, timeout=3.0)
                assert f"process {pid} on " in register_refused(second, attempt=2)
            finally:
                os.kill(pid, signal.SIGCONT)
            # it sends its report again: the first one may have arrived
            waits.wait_until(
                lambda: (
                    first.http.post(f"/sessions/{session_id}/finish", json=dataplane.outside.END).status_code
                    != 503
                )
            )
            agents.await_more()
        dataplane.outside.await_stored(str(tmp_path / "run"), [*agents.acknowledged, session_id])


def test_after_a_failover_agents_that_go_on_find_all_that_was_acknowledged(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    with contextlib.ExitStack() as held:
        first = held.enter_context(process(tmp_path, model_dir, "a"))
        begin(first, renderer, 1)
        agents = held.enter_context(dataplane.outside.agents_at(first.url))
        agents.await_more()
        os.kill(pid_of(first), signal.SIGKILL)
        port = int(first.url.rsplit(":", 1)[1])
        again = held.enter_context(process(tmp_path, model_dir, "a", port))
        agents.await_more()
        begin(again, renderer, 2)
        agents.await_more()
        agents.stop()
        dataplane.outside.await_stored(str(tmp_path / "run"), agents.acknowledged)


def test_a_released_run_can_be_continued_at_another_data_plane_and_come_back(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    ended = []
    with process(tmp_path, model_dir, "a") as first, process(tmp_path, model_dir, "b") as second:
        for attempt, plane in enumerate((first, second, first), 1):
            # the release is recorded, and the last engine gone, a moment later
            waits.wait_until(lambda plane=plane, attempt=attempt: register_if_free(plane, attempt))
            begin(plane, renderer, attempt)
            [claim] = plane.claim(1, runner=f"a{attempt}")
            plane.post(f"/sessions/{claim['session_id']}/v1/chat/completions", dataplane.outside.HI)
            plane.post(f"/sessions/{claim['session_id']}/finish", dataplane.outside.END)
            ended.append(claim["session_id"])
            plane.post("/runs/run/release")
        status = first.get("/runs/run")
    # in each attempt one more place of the first groups was taken
    assert len(set(ended)) == 3
    assert status["groups_accepted"] + status["groups_in_flight"] >= 1
    assert status["counters"].get("finished_sessions", 0) <= 3


def register_if_free(plane: dataplane.planes.ServedPlane, attempt: int) -> bool:
    """Whether the attempt can be registered; one that is registered again stays the same."""
    with contextlib.suppress(AssertionError):
        return bool(plane.register(attempt=attempt))
    return False


def test_a_run_whose_directory_was_removed_can_begin_again(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    with process(tmp_path, model_dir, "a") as plane:
        begin(plane, renderer, 1, origin="first")
        session_id = open_and_ask(plane)
        shutil.rmtree(tmp_path / "run")
        told = refusal(plane, f"/sessions/{session_id}/finish", dataplane.outside.END)
        assert told.startswith("journal_changed: ") and "moved or removed" in told
        begin(plane, renderer, 1, origin="second")
        session_id = open_and_ask(plane)
        plane.post(f"/sessions/{session_id}/finish", dataplane.outside.END)
        dataplane.outside.await_stored(str(tmp_path / "run"), [session_id])
        assert list(dataplane.outside.stored(str(tmp_path / "run"))) == [session_id]


# --- without a lock on a common journal


def no_locks(fd: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@contextlib.contextmanager
def plane_in_thread(
    folder: Path, model_dir: str, name: str, *, has_locks: bool = True
) -> Iterator[dataplane.planes.ServedPlane]:
    app = make_app(account_key(), DataplaneOptions(str(folder / name), grace_s=0.1), welcomes_strangers=True)
    if not has_locks:
        app.state.plane.owner.flock = no_locks
    with dataplane.planes.serving(app) as url, dataplane.planes.attended(url, folder, model_dir) as plane:
        yield plane


@pytest.fixture(params=["s3", "without locks"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run that no lock guards: in a bucket, or on a disk without locks. Not in fsspec's memory, where other
    threads find a file that is still written."""
    root = request.getfixturevalue("s3_bucket") if request.param == "s3" else ""
    return f"{root}{tmp_path}/run"


def test_a_superseded_data_plane_acknowledges_no_end(
    tmp_path: Path, model_dir: str, renderer: Renderer, run_dir: str
) -> None:
    has_locks = not is_local(run_dir)
    with (
        plane_in_thread(tmp_path, model_dir, "a", has_locks=has_locks) as first,
        plane_in_thread(tmp_path, model_dir, "b", has_locks=has_locks) as second,
    ):
        begin(first, renderer, 1, run_dir=run_dir)
        before, rewarded, left = (open_and_ask(first) for _ in range(3))
        [claim] = first.claim()
        first.post(f"/sessions/{rewarded}/reward", {"reward": 0.5})
        first.post(f"/sessions/{before}/finish", dataplane.outside.END)
        begin(second, renderer, 2, run_dir=run_dir)
        refused = {
            f"/sessions/{rewarded}/reward": {"reward": 1.0},
            f"/sessions/{left}/finish": dataplane.outside.END,
            "/runs/run/finished": {
                "sessions": [{"session_id": claim["session_id"], **dataplane.outside.END}]
            },
            "/sessions": {"run_id": "run"},
        }
        why = "Attempt 1 of run run was superseded by a later attempt" if has_locks else "journal_changed: "
        for path, body in refused.items():
            assert why in refusal(first, path, body)
        assert "superseded" in register_refused(first, attempt=1, run_dir=run_dir)
        after = open_and_ask(second)
        second.post(f"/sessions/{after}/finish", dataplane.outside.END)
        dataplane.outside.await_stored(run_dir, [before, after])


def test_an_end_that_comes_while_a_flow_begins_another_attempt_is_acknowledged_once_it_is_registered(
    tmp_path: Path, model_dir: str, renderer: Renderer, run_dir: str
) -> None:
    with plane_in_thread(tmp_path, model_dir, "a", has_locks=not is_local(run_dir)) as plane:
        begin(plane, renderer, 1, run_dir=run_dir)
        session_id = open_and_ask(plane)
        RunDirectory(run_dir).begin_attempt(Attempt(dataplane=plane.url))
        answers: list[int] = []

        def finish() -> None:
            with dataplane.planes.operator_client(plane.url) as http:
                answers.append(
                    http.post(f"/sessions/{session_id}/finish", json=dataplane.outside.END).status_code
                )

        thread = threading.Thread(target=finish)
        thread.start()
        waits.wait_until(lambda: plane.http.get(f"/sessions/{session_id}").status_code == 404)
        plane.register(attempt=2, run_dir=run_dir)
        waits.join(thread)
        assert answers == [200]
        dataplane.outside.await_stored(run_dir, [session_id])


def test_a_stopped_data_plane_of_a_remote_run_acknowledges_nothing_after_it_was_superseded(
    tmp_path: Path, model_dir: str, renderer: Renderer, s3_bucket: str
) -> None:
    run_dir = f"{s3_bucket}{tmp_path}/run"
    with process(tmp_path, model_dir, "a") as first, process(tmp_path, model_dir, "b") as second:
        begin(first, renderer, 1, run_dir=run_dir)
        pid = pid_of(first)
        with dataplane.outside.agents_at(first.url) as agents:
            agents.await_more()
            os.kill(pid, signal.SIGSTOP)
            try:
                begin(second, renderer, 2, run_dir=run_dir)
                with dataplane.outside.agents_at(second.url) as others:
                    others.await_more()
            finally:
                os.kill(pid, signal.SIGCONT)
            waits.wait_until(lambda: agents.refusals[409] >= 3, "refusals of the superseded one")
            num_acknowledged = len(agents.acknowledged)
            waits.wait_until(lambda: agents.refusals[409] >= 6, "further refusals")
            assert len(agents.acknowledged) == num_acknowledged
        dataplane.outside.await_stored(run_dir, [*agents.acknowledged, *others.acknowledged])
