"""A run whose curriculum cannot be told what came of earlier groups is refused, and goes on without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sf_core.dataplane.errors import ApiError
from tests.bench.dataplane.run_driver import Driver

POOL = {"pool": 30, "solved": 0.0}


def unlink(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def hide(file: Path) -> None:
    """What the storage cannot read: StorageError."""
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (unlink, ": no such file"),
        (cut, ": not a complete Parquet file"),
        (hide, " is a folder, but must be a file"),
    ],
)
@pytest.mark.parametrize("has_journal", [True, False])
async def test_a_file_of_outcomes_that_cannot_be_read_is_named_and_a_run_goes_on_without_it(
    driver: Driver, damage: Callable[[Path], None], fault: str, has_journal: bool
) -> None:
    await driver.register(curriculum=POOL, gate="all")
    await driver.iterate(3)
    done = driver.ledger.list_done_before(3)
    at = {"attempt": 2, "iteration": 3, "version": driver.version, "done_groups": done}
    await driver.register(**at)
    [file] = (driver.folder / "run/outcomes/iteration=1").iterdir()
    journal = driver.run.journal.path

    def lose() -> None:
        damage(file)
        if not has_journal:
            journal.unlink()

    await driver.restart(lose)
    assert driver.plane.runs == {}, "the log says why"
    with pytest.raises(ApiError) as refused:
        await driver.register(**at)
    assert refused.value.status == 409
    assert f"{file}{fault}" in refused.value.message
    assert refused.value.message.endswith(
        "; to continue without these results, remove rollout.curriculum from the configuration, or "
        "remove the manifests of this and all later iterations"
    )

    manifests = driver.folder / "run/manifests"
    for iteration in (1, 2):
        (manifests / f"{iteration:05d}/rollout.json").rename(manifests / f"{iteration}.json")
    back = {"attempt": 3, "iteration": 1, "version": 1, "done_groups": done[:2]}
    await driver.register(**back)
    assert len(driver.ledger.tasks.past) > 0, "of iteration 0"
    await driver.move("another")
    for iteration in (1, 2):
        (manifests / f"{iteration}.json").rename(manifests / f"{iteration:05d}/rollout.json")

    with pytest.raises(ApiError, match=fault):
        await driver.register(**at | {"attempt": 4})
    await driver.register(**at | {"attempt": 4, "curriculum": None})
    assert driver.ledger.tasks.past == {}
    await driver.iterate(4)
