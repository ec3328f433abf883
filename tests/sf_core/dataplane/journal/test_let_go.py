"""Runs that are over leave the memory of a data plane that stays up."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.patience import join, wait_until
from tests.sf_core.dataplane.runs.test_run import seal, work
from tests.sf_core.dataplane.stand import Server, attended, running_process, say


@pytest.fixture(params=[1, 2])
def num_gateways(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def serving(num_gateways: int, tmp_path: Path, model_dir: str, renderer: Renderer) -> Iterator[Server]:
    options = ("--gateways", str(num_gateways), "--journal-dir", str(tmp_path / "plane"))
    module = "tests.sf_core.dataplane.hasty"
    with (
        running_process(tmp_path / "port", 0, *options, module=module) as url,
        attended(url, tmp_path, model_dir) as server,
    ):
        server.register()
        server.connect(lambda prompt, seed: say(renderer, f"answer {seed % 1000}"))
        yield server


def is_served(server: Server) -> bool:
    return server.http.get("/runs/run").status_code == 200


def is_free(lock: Path) -> bool:
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_released_run_that_nobody_works_on_is_let_go_and_registered_again_goes_on(
    serving: Server, renderer: Renderer, num_gateways: int
) -> None:
    for claim in serving.claim(3):
        work(serving, claim)
    serving.post("/runs/run/release")
    wait_until(lambda: not is_served(serving))
    answer = serving.http.post("/runs/run/claim", json={"runner": "a0", "max": 1})
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Run run is not registered here.")
    locks = sorted((serving.run_dir / "run").rglob("*.lock"))
    assert [lock.name for lock in locks] == ["0.lock", "1.lock"][: 2 * num_gateways - 2]
    wait_until(lambda: all(map(is_free, locks)))

    serving.register(attempt=2)
    serving.connect(lambda prompt, seed: say(renderer, "again"), attempt=2)
    [claim] = serving.claim(4)[:1]
    work(serving, claim)
    assert seal(serving, 0, attempt=2)["groups"] == [0, 1]


def test_a_run_that_is_not_released_is_kept(serving: Server) -> None:
    serving.register(attempt=2)
    join(serving.threads[0])
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert is_served(serving)
