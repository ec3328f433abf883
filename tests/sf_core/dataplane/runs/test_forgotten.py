"""A run whose curriculum cannot be told what came of earlier groups is refused, and goes on without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.options import DataplaneOptions
from tests.sf_core.dataplane.runs.test_curriculum_replay import CurriculumDriver

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
def test_a_file_of_outcomes_that_cannot_be_read_is_named_and_a_run_goes_on_without_it(
    tmp_path: Path,
    model_dir: str,
    renderer: Renderer,
    damage: Callable[[Path], None],
    fault: str,
    has_journal: bool,
) -> None:
    async def scenario() -> None:
        driver = CurriculumDriver(tmp_path, model_dir, renderer, curriculum=POOL, gate="all")
        await driver.register()
        while driver.run.state.ledger.next_batch < 3:
            for operation in ("play", "seal", "publish"):
                await getattr(driver, operation)()
        await driver.commit()
        done = driver.run.state.ledger.list_done_before(3)
        at = {"attempt": 2, "iteration": 3, "version": driver.version, "done_groups": done}
        await driver.register(**at)
        await driver.plane.close()
        [file] = (Path(driver.spec["run_dir"]) / "outcomes/iteration=1").iterdir()
        damage(file)
        if not has_journal:
            driver.run.journal.path.unlink()
        driver.plane = DataPlane(DataplaneOptions(str(tmp_path / "plane")))
        await driver.plane.reopen()
        assert driver.plane.runs == {}, "the log says why"
        with pytest.raises(ApiError) as refused:
            await driver.register(**at)
        assert refused.value.status == 409
        assert f"{file}{fault}" in refused.value.message
        assert refused.value.message.endswith(
            "; to continue without these results, remove rollout.curriculum from the configuration, or "
            "remove the manifests of this and all later iterations"
        )

        manifests = Path(driver.spec["run_dir"]) / "manifests"
        for iteration in (1, 2):
            (manifests / f"{iteration:05d}/rollout.json").rename(manifests / f"{iteration}.json")
        back = {"attempt": 3, "iteration": 1, "version": 1, "done_groups": done[:2]}
        await driver.register(**back)
        assert len(driver.run.state.ledger.tasks.past) > 0, "of iteration 0"
        await driver.plane.close()
        for iteration in (1, 2):
            (manifests / f"{iteration}.json").rename(manifests / f"{iteration:05d}/rollout.json")

        driver.plane = DataPlane(DataplaneOptions(str(tmp_path / "another")))
        with pytest.raises(ApiError, match=fault):
            await driver.register(**at | {"attempt": 4})
        driver.rules["curriculum"] = None
        await driver.register(**at | {"attempt": 4})
        assert driver.run.state.ledger.tasks.past == {}
        await driver.plane.close()

    asyncio.run(scenario())
