"""Sessions that agents opened become rows of the run directory once they are finished, each exactly once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.runs import sealing
from sf_core.reports.view import RunView
from storage.tables.schema import NOT_SAMPLED
from tests.bench.dataplane import run_driver
from tests.bench.dataplane.served_runs import stored
from tests.bench.properties import examples

OPERATIONS = [
    *("open", "open", "finish_opened", "finish_opened", "fail_opened", "store", "store_without_record"),
    *("finish_while_the_journal_is_compacted", "restart", "publish", "play", "seal", "begin_attempt"),
    "reward_opened",
]


def check(driver: run_driver.Driver) -> None:
    rows = stored(driver.folder / "run")
    assert Counter(row.branch_id for _, row in rows) == Counter({row.branch_id for _, row in rows})
    trained: Counter[str] = Counter()
    for version, row in rows:
        assert version == driver.finished[row.session_id][1]
        assert (row.group_id in ("g0", "g1"), row.task_id, row.reward) == (True, "t", 1.0)
        sampled = row.policy_versions != NOT_SAMPLED
        assert np.array_equal(sampled, ~np.isnan(row.logprobs))
        assert not (row.loss_mask & ~sampled).any()
        assert (np.diff(row.policy_versions[sampled]) >= 0).all()
        trained[row.session_id] += int(row.loss_mask.sum())
    assert trained == {session_id: tokens for session_id, (tokens, _) in driver.finished.items()}


@settings(max_examples=examples(25))
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=30))
@example(operations=["open", "open", "finish_while_the_journal_is_compacted", "restart"])
@example(
    operations=[
        *(["open"] * 4 + ["finish_opened", "play", "play", "seal", "publish", "finish_opened"]),
        *("store_without_record", "finish_opened", "restart", "finish_opened", "store"),
    ]
)
async def test_every_finished_session_is_stored_once_wherever_storing_breaks_off(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async with run_driver.driving(model_dir, renderer) as driver:
        await driver.register()
        await driver.do(*operations, "restart")
        await driver.check_restart()
        await driver.plane.release(driver.run)
        check(driver)
        assert not driver.run.state.results.external


async def test_what_cannot_be_written_waits(
    driver: run_driver.Driver, caplog: pytest.LogCaptureFixture
) -> None:
    await driver.register()
    in_the_way = driver.folder / "run" / "opened"
    in_the_way.touch()
    await driver.do("open", "finish_opened")
    await driver.plane.release(driver.run)
    assert "1 opened sessions wait to be written: the session file of opened 0 cannot be" in caplog.text
    # a released run is served again until it has written all
    await driver.restart()
    in_the_way.unlink()
    driver.plane.stores["run"].store_soon()
    await driver.store()
    check(driver)


async def test_the_journal_stays_bounded_where_no_batch_is_ever_sealed(
    driver: run_driver.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "SPARE_BYTES", 10_000)
    await driver.register()
    await driver.open()
    sizes = []
    for _ in range(60):
        await driver.do("open", "finish_opened", "store")
        sizes.append(driver.run.journal.path.stat().st_size)
    assert max(sizes) < 20_000
    check(driver)


async def test_a_session_is_found_by_its_id(driver: run_driver.Driver) -> None:
    await driver.register()
    await driver.do("open", "finish_opened", "store")
    [session_id] = driver.finished
    sampling, branches = RunView(driver.directory).find_session(session_id)
    assert (sampling.label, len(branches)) == ("opened at version 0", 2)
