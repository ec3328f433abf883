"""Journals of earlier versions are read: without picks, with a gate that is named by its name alone, and from
before processes owned journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sf_core.dataplane.journal.framing import frame_payload, frames, payload
from sf_core.dataplane.runs import decide
from sf_core.recipes.gates import Varied
from sf_core.recipes.outcomes import Pick, TaskRef
from storage.tables.outcomes import read_outcomes
from tests.bench.dataplane.run_driver import Driver

JOURNALS = Path(__file__).parents[3] / "data/journals"

JOURNAL = JOURNALS / "before_picks.journal"
"""Of version e1e84bd: batch 0 is sealed (groups 0 and 2), group 3 is dropped, 4 is complete, 5 is half done,
6 and 7 have begun."""


OPEN_SESSION = "run.open.9bcf8a535e85246c"

BEFORE_OWNERS = JOURNALS / "before_owners.journal"
"""Of version db999c56: batch 0 is sealed (group 0), group 1 is complete, 2 is half done, and an agent outside
has opened OPEN_SESSION and given it a reward."""


async def serve(driver: Driver, journal: Path) -> None:
    """Serve the run of this journal in place of the run that is served."""
    written = driver.run.journal.path
    data = moved(driver, journal)

    def replace() -> None:
        # no process owned journals
        written.with_suffix(".lock").unlink()
        written.write_bytes(data)

    await driver.restart(replace)


def moved(driver: Driver, journal: Path) -> bytes:
    """The journal with the folders of this machine."""
    data = b""
    kinds = set()
    with journal.open("rb") as file:
        for found in frames(file):
            kind, *values = msgspec.msgpack.decode(payload(found))
            kinds.add(kind)
            if kind == "registered":
                values[0] |= {name: driver.spec[name] for name in ("run_dir", "model_dir")}
            event = msgspec.msgpack.encode([kind, *values])
            data += frame_payload(event)
    assert "registered" in kinds and "admitted" not in kinds
    return data


async def test_a_run_of_the_time_before_journals_had_owners_goes_on(driver: Driver) -> None:
    await driver.register(gate="all", groups_per_batch=1)
    await serve(driver, BEFORE_OWNERS)
    assert sorted(driver.run.sessions) == ["run.g2.1.a0", OPEN_SESSION]
    earned = driver.run.sessions[OPEN_SESSION].earned
    assert earned is not None and earned.reward == 0.25
    await driver.register(attempt=2, iteration=1, version=1)
    sealed = await driver.seal_batch(1)
    assert (sealed["groups"], sealed["sessions"]) == ([1], 2)
    while not decide.readiness(driver.ledger, 2).ready:
        await driver.play()
    assert OPEN_SESSION in driver.run.sessions


@pytest.mark.parametrize("curriculum", [None, {"pool": 30, "solved": 0.0}])
async def test_a_run_of_an_earlier_version_goes_on(driver: Driver, curriculum: Any) -> None:
    await driver.register(gate="varied")
    await serve(driver, JOURNAL)
    run = driver.run
    # no files of outcomes were written
    driver.untold.update(run.state.ledger.list_done_before(1))
    assert run.spec.rollout.gate == Varied()
    assert list(run.state.ledger.batches) == [0]
    assert run.state.ledger.rejected == {3: "equal_rewards"}
    picks = [group.pick for group in run.state.ledger.groups.values()]
    assert picks == [Pick(TaskRef("", number), 0, 2, 2) for number in (4, 5, 6, 7)]
    assert sorted(run.sessions) == ["run.g5.1.a0", *(f"run.g{g}.{m}.a0" for g in (6, 7) for m in (0, 1))]

    await driver.register(attempt=2, iteration=1, version=1, curriculum=curriculum)
    while not decide.readiness(run.state.ledger, 1).ready:
        await driver.play()
    assert "outcomes" not in await driver.seal_batch(0), "as it was answered"
    await driver.seal_batch(1)
    await driver.commit()
    rows = list(read_outcomes(driver.directory, before=2))
    verdicts = {row["number"]: row["verdict"] for row in rows if row["number"] < 5}
    assert verdicts == {3: "equal_rewards", 4: "sealed"}
    earlier = [row for row in rows if row["number"] < 8]
    assert [row["task_index"] for row in earlier] == [row["number"] for row in earlier]
    assert driver.ledger.next_batch == 2
