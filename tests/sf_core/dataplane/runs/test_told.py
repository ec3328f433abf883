"""What a sealed batch tells of the groups that have left: rows, kinds, and lengths of sessions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sf_core.dataplane.errors import ApiError
from storage import files
from storage.files import FileRef
from tests.bench.dataplane.run_driver import Driver

RULES: dict[str, Any] = {"group_size": 2, "groups_per_batch": 1, "session_attempts": 1}


def answer(driver: Driver, num_tokens: int) -> list[int]:
    """An answer of the policy of so many tokens."""
    return [*[5] * (num_tokens - 1), driver.renderer.stop_token_ids[0]]


async def test_groups_are_told_once_and_counted_by_how_many_sessions_were_right(driver: Driver) -> None:
    await driver.register(**RULES, gate={"kind": "mixed"})
    for rewards in ((1.0, 1.0), (0.0, 0.5), (1.0, 1.0), [None], (1.0, 0.0)):
        await driver.end_group(rewards)
    first = await driver.seal_batch(0)
    assert (first["right"], first["mixed"], first["wrong"]) == (2, 1, 1), "one had no result"
    rows = driver.outcomes(first)
    verdicts = ["not_mixed", "not_mixed", "not_mixed", "agent_error", "sealed"]
    assert [row["verdict"] for row in rows] == verdicts
    assert [row["scores"] for row in rows] == [[1.0, 1.0], [0.0, 0.5], [1.0, 1.0], [], [1.0, 0.0]]
    assert [row["tokens"] for row in rows[-2:]] == [[], [2, 2]]
    assert (rows[4]["task_index"], rows[4]["group_id"]) == (4, "run.g4")
    assert rows[4]["statuses"] == ["finished", "finished"]
    await driver.publish()
    await driver.end_group((0.0, 1.0))
    await driver.restart()
    second = await driver.seal_batch(1)
    assert [row["number"] for row in driver.outcomes(second)] == [5]
    assert (second["right"], second["mixed"], second["wrong"]) == (0, 1, 0)
    assert second.keys().isdisjoint({"length_kept", "length_cut", "cut_sessions"})


async def test_external_groups_are_told_without_a_task_and_not_counted(driver: Driver) -> None:
    rules = RULES | {"groups_per_batch": 2}
    await driver.register(**rules, gate="varied", success={"at_least": 0.5}, outside_groups=1)
    for reward, session in enumerate(await driver.declared(2, task_id="ticket")):
        await driver.end(session, float(reward))
    await driver.claim()
    [first, second] = driver.given_out[:2]
    await driver.end(first, 0.5)
    await driver.end(second, 0.4)
    sealed = await driver.seal_batch(0)
    assert (sealed["right"], sealed["mixed"], sealed["wrong"]) == (0, 1, 0)
    tasks = {row["number"]: (row["task_index"], row["scores"]) for row in driver.outcomes(sealed)}
    assert tasks == {0: (None, [0.0, 1.0]), 1: (1, [0.5, 0.4])}


async def test_a_run_that_does_not_choose_tells_what_it_always_has(driver: Driver) -> None:
    await driver.register(**RULES, gate="all", success={"at_least": 0.5})
    await driver.end_group((1.0, 1.0))
    sealed = await driver.seal_batch(0)
    told = "answers branches cut_answers discarded engines_free failures files groups interruptions "
    told += "last_error max_lag rejected reward_max reward_mean reward_min runners runners_seconds "
    assert " ".join(sorted(sealed)) == f"{told}sampled_tokens sessions"
    assert files.list_files(f"{driver.spec['run_dir']}/outcomes/iteration=0") == []
    assert not any(name.startswith(("groups.", "surplus")) for name in driver.run.counters)


async def test_lengths_are_of_the_groups_of_the_batch_and_are_told_once(driver: Driver) -> None:
    await driver.register(**RULES, gate="varied", spare_sessions=2)

    async def group(kept: tuple[int, int], cut: tuple[int, int], rewards: tuple[float, float]) -> None:
        await driver.claim()
        await driver.claim()
        four = driver.given_out[:4]
        assert len({s.claim.slot.group for s in four if s.claim}) == 1
        for session, num_tokens in zip(four[2:], cut, strict=True):
            if num_tokens:
                driver.sample(session, answer(driver, num_tokens))
        for session, num_tokens, reward in zip(four[:2], kept, rewards, strict=True):
            await driver.end(session, reward, answer(driver, num_tokens))

    await group((3, 5), (9, 9), (1.0, 1.0))  # dropped by the gate
    await group((3, 5), (8, 0), (1.0, 0.0))
    await group((2, 4), (7, 11), (1.0, 0.0))
    told = {}
    for batch in range(2):
        sealed = await driver.seal_batch(batch)
        told[batch] = {name: sealed[name] for name in ("length_kept", "length_cut", "cut_sessions")}
        await driver.publish()
    assert told == {
        0: {"length_kept": 4.0, "length_cut": 8.0, "cut_sessions": 1},
        1: {"length_kept": 3.0, "length_cut": 9.0, "cut_sessions": 2},
    }
    assert driver.run.counters["surplus_sessions"] == 4
    assert driver.run.counters["surplus_tokens"] == 26
    assert driver.run.state.results.cut == {}

    await group((2, 2), (6, 6), (1.0, 0.0))
    await driver.run.compact()
    await driver.restart()
    sealed = await driver.seal_batch(2)
    # the turns of cut sessions are not in the journal any more
    assert (sealed["length_kept"], sealed["length_cut"], sealed["cut_sessions"]) == (2.0, None, 0)
    assert json.dumps(sealed)


async def test_a_run_that_starts_over_forgets_the_lengths(driver: Driver) -> None:
    await driver.register(**RULES, spare_sessions=1, gate="all")
    await driver.claim()
    [first, second, third] = driver.given_out
    driver.sample(third, answer(driver, 4))
    await driver.end(first)
    await driver.end(second)
    assert driver.run.state.results.cut == {0: [4]}
    await driver.register(attempt=2, iteration=5, version=5, done_groups=[0])
    assert driver.run.state.results.cut == {}


async def test_outcomes_that_cannot_be_written_are_written_later_under_the_same_name(driver: Driver) -> None:
    await driver.register(**RULES, gate="varied")
    await driver.end_group((1.0, 1.0))
    await driver.end_group((1.0, 0.0))
    in_the_way = driver.folder / "run/outcomes"
    in_the_way.write_text("", encoding="utf-8")
    with pytest.raises(
        ApiError, match=r"the outcomes of batch 0 cannot be written: .*iteration=0/rollout-1"
    ) as failed:
        await driver.seal_batch(0)
    assert failed.value.status == 500
    in_the_way.unlink()
    sealed = await driver.seal_batch(0)
    assert (sealed["sessions"], [row["number"] for row in driver.outcomes(sealed)]) == (2, [0, 1])
    assert (sealed["right"], sealed["mixed"]) == (1, 1)
    # killed before its flow was answered, it answers the same
    await driver.restart()
    again = await driver.seal_batch(0)
    assert again == sealed
    [ref] = again["outcomes"]
    assert ref["uri"] == "outcomes/iteration=0/rollout-1.parquet"
    assert FileRef(**ref).bytes == (driver.folder / "run" / ref["uri"]).stat().st_size


async def test_killed_between_the_file_of_outcomes_and_the_record_of_the_batch_it_writes_the_same_file(
    driver: Driver,
) -> None:
    await driver.register(**RULES, gate="varied")
    await driver.end_group((1.0, 1.0))
    await driver.end_group((1.0, 0.0))
    journal = driver.run.journal.path
    before = journal.read_bytes()
    written = await driver.seal_batch(0)
    # as if it had been killed there
    await driver.restart(lambda: journal.write_bytes(before))
    again = await driver.seal_batch(0)
    assert again["outcomes"] == written["outcomes"]
