"""Runs that are over leave the memory of a data plane that stays up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane.planes import ServedPlane, attended, running_process, say
from tests.patience import join, wait_until
from tests.sf_core.dataplane.runs.test_run import seal, work


@pytest.fixture
def serving(tmp_path: Path, model_dir: str, renderer: Renderer) -> Iterator[ServedPlane]:
    options = ("--journal-dir", str(tmp_path / "plane"))
    module = "tests.bench.dataplane.hasty"
    with (
        running_process(tmp_path / "port", 0, *options, module=module) as url,
        attended(url, tmp_path, model_dir) as plane,
    ):
        plane.register()
        plane.connect(lambda prompt, seed: say(renderer, f"answer {seed % 1000}"))
        yield plane


def is_served(plane: ServedPlane) -> bool:
    return plane.http.get("/runs/run").status_code == 200


def test_a_released_run_that_nobody_works_on_is_let_go_and_registered_again_goes_on(
    serving: ServedPlane, renderer: Renderer
) -> None:
    for claim in serving.claim(3):
        work(serving, claim)
    serving.post("/runs/run/release")
    wait_until(lambda: not is_served(serving))
    answer = serving.http.post("/runs/run/claim", json={"runner": "a0", "max": 1})
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Run run is not registered here.")

    serving.register(attempt=2)
    serving.connect(lambda prompt, seed: say(renderer, "again"), attempt=2)
    [claim] = serving.claim(4)[:1]
    work(serving, claim)
    assert seal(serving, 0, attempt=2)["groups"] == [0, 1]


def test_a_run_that_is_not_released_is_kept(serving: ServedPlane) -> None:
    serving.register(attempt=2)
    join(serving.threads[0])
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert is_served(serving)
