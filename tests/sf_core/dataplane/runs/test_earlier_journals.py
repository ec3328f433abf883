"""Journals of earlier versions are read: without picks, with a gate that is named by its name alone, from
before processes owned journals, and from before the beginning of every group was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sf_core.dataplane.journal.journal_file import frame_payload, frames, payload
from sf_core.dataplane.runs import decide
from sf_core.dataplane.runs.groups import Group
from sf_core.recipes.gates import Varied
from sf_core.recipes.outcomes import Outcome, Pick, TaskRef
from storage.tables.outcomes import read_outcomes
from tests.bench.dataplane.run_driver import Driver

JOURNALS = Path(__file__).parents[3] / "data/journals"

JOURNAL = JOURNALS / "before_picks.journal"
"""Of version e1e84bd: batch 0 is sealed (groups 0 and 2), group 3 is dropped, 4 is complete, 5 is half done,
6 and 7 have begun."""


OPEN_SESSION = "run.open.9bcf8a535e85246c"

BEFORE_OWNERS = JOURNALS / "before_owners.journal"
"""Of version db999c56: batch 0 is sealed (group 0), group 1 is complete, 2 is half done, and an external
agent has opened OPEN_SESSION and given it a reward."""


BEFORE_ADMITTED = JOURNALS / "before_admitted.journal"
"""Of version bfeb7f2a: batch 0 is sealed (groups 0 and 1), 2 to 4 are complete, 5 is dropped and 6 has begun.
Then a third attempt has a curriculum, and records the pick of group 6 before it completes the group."""


async def serve(driver: Driver, journal: Path, before_attempt: int = 1000) -> None:
    """Serve the run of this journal, as it was before this attempt, in place of the run that is served."""
    written = driver.run.journal.path
    data = moved(driver, journal, before_attempt)

    def replace() -> None:
        # no process owned journals
        written.with_suffix(".lock").unlink()
        written.write_bytes(data)

    await driver.restart(replace)


def moved(driver: Driver, journal: Path, before_attempt: int) -> bytes:
    """The journal with the folders of this machine."""
    data = b""
    with journal.open("rb") as file:
        for found in frames(file):
            kind, *values = msgspec.msgpack.decode(payload(found))
            if kind == "registered" and values[0]["attempt"] >= before_attempt:
                break
            if kind == "registered":
                values[0] |= {name: driver.spec[name] for name in ("run_dir", "model_dir")}
            event = msgspec.msgpack.encode([kind, *values])
            data += frame_payload(event)
    assert data
    return data


def kinds(path: Path) -> list[str]:
    """The kinds of the events of a journal, in order."""
    with path.open("rb") as file:
        return [msgspec.msgpack.decode(payload(found))[0] for found in frames(file)]


def attempts(group: Group) -> list[tuple[str, int, float | None]]:
    """Progress, number of the latest attempt and reward of each session of a group."""
    return [
        (member.progress.name, member.attempt, member.result.reward if member.result else None)
        for member in group.members
    ]


@pytest.mark.parametrize("before_attempt", [3, 1000])
async def test_groups_that_were_not_recorded_are_recovered_as_the_version_that_wrote_them_did(
    driver: Driver, before_attempt: int
) -> None:
    await driver.register(gate="all")
    assert kinds(BEFORE_ADMITTED).count("admitted") == 1 and "admitted" not in kinds(BEFORE_OWNERS)
    await serve(driver, BEFORE_ADMITTED, before_attempt)
    # what bfeb7f2a recovered from the same bytes
    expected = {
        2: [("DONE", 0, 1.0), ("DONE", 0, 1.0)],
        3: [("DONE", 0, 0.0), ("DONE", 0, 0.0)],
        4: [("DONE", 0, 0.0), ("DONE", 2, 1.0)],
        6: [("OPEN", 1, None), ("OPEN", 1, None)],
    }
    if before_attempt > 3:
        expected[6] = [("DONE", 2, 1.0), ("DONE", 2, 0.0)]
    for compacted in (False, True):
        if compacted:
            await driver.run.compact()
            assert kinds(driver.run.journal.path).count("admitted") == 7, "each group is recorded from now on"
            await driver.restart()
        ledger = driver.ledger
        assert {index: attempts(group) for index, group in ledger.groups.items()} == expected
        picks = {index: group.pick for index, group in ledger.groups.items()}
        assert picks == {index: Pick(TaskRef("", index), 0, 2, 2) for index in expected}
        assert ledger.tasks.in_flight == {TaskRef("", index): 1 for index in expected}
        assert ledger.rejected == {5: "agent_error"}
        dropped = Outcome(5, Pick(TaskRef("", 5), 0, 2, 2), 2, 0, (), "agent_error")
        assert ledger.ended == [dropped]
        assert ledger.list_done_before(1) == [0, 1]
        assert ledger.next_group == 7
    driver.untold.update(ledger.list_done_before(1))


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
