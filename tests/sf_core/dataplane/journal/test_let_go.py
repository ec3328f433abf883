"""Runs that are over leave the memory of a data plane that stays up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench import waits
from tests.bench.dataplane import planes, small_runs


@pytest.fixture
def hasty_plane(tmp_path: Path, model_dir: str, renderer: Renderer) -> Iterator[planes.ServedPlane]:
    options = ("--journal-dir", str(tmp_path / "plane"))
    module = "tests.bench.dataplane.hasty"
    with (
        planes.running_process(tmp_path / "port", 0, *options, module=module) as url,
        planes.attended(url, tmp_path, model_dir) as plane,
    ):
        plane.register()
        plane.connect(lambda prompt, seed: planes.say(renderer, f"answer {seed % 1000}"))
        yield plane


def is_served(plane: planes.ServedPlane) -> bool:
    return plane.http.get("/runs/run").status_code == 200


def test_a_released_run_that_nobody_works_on_is_let_go_and_registered_again_goes_on(
    hasty_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    for claim in hasty_plane.claim(3):
        small_runs.work(hasty_plane, claim)
    hasty_plane.post("/runs/run/release")
    waits.wait_until(lambda: not is_served(hasty_plane))
    answer = hasty_plane.http.post("/runs/run/claim", json={"runner": "a0", "max": 1})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        404,
        "Run run is not registered at this data plane.",
    )

    hasty_plane.register(attempt=2)
    hasty_plane.connect(lambda prompt, seed: planes.say(renderer, "again"), attempt=2)
    [claim] = hasty_plane.claim(4)[:1]
    small_runs.work(hasty_plane, claim)
    assert small_runs.seal(hasty_plane, 0, attempt=2)["groups"] == [0, 1]


def test_a_run_that_is_not_released_is_kept(hasty_plane: planes.ServedPlane) -> None:
    hasty_plane.register(attempt=2)
    waits.join(hasty_plane.threads[0])
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert is_served(hasty_plane)
