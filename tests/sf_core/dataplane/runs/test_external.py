"""Sessions that agents opened become rows of the run directory once they are finished, each exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.bodies import FinishBody, SessionBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.runs import endings, sealing
from sf_core.dataplane.runs.claiming import open_session
from sf_core.dataplane.runs.sealing import ExternalSessions
from sf_core.dataplane.sessions.session import Session
from sf_core.reports.view import RunView
from storage.run_directory import RunDirectory
from storage.tables.schema import NOT_SAMPLED, Trajectory
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench.dataplane.conversations import sample, user
from tests.bench.dataplane.planes import say
from tests.bench.dataplane.run_driver import Driver
from tests.properties import examples

OPERATIONS = [
    *("open", "open", "finish_opened", "finish_opened", "fail_opened", "store", "store_without_record"),
    *("finish_while_the_journal_is_compacted", "restart", "publish", "play", "seal", "begin_attempt"),
]


def stored(run_dir: Path) -> list[tuple[int, Trajectory]]:
    """All rows, with the policy version of their folder."""
    files = RunDirectory(str(run_dir)).list_partitions("opened")
    return [(v, row) for v, uris in files.items() for uri in uris for row in to_rows(read_trajectories(uri))]


class OpeningDriver(Driver):
    """A run in which agents open sessions too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.finished: dict[str, tuple[int, int]] = {}
        """Number of sampled tokens of each session, and the newest version among them."""

    @property
    def store_of_run(self) -> ExternalSessions:
        return self.plane.stores["run"]

    @property
    def opened(self) -> list[Session]:
        return [session for session in self.run.sessions.values() if session.claim is None]

    async def open(self) -> None:
        await open_session(
            self.run,
            SessionBody(run_id="run", group=f"g{len(self.opened) % 2}", task_id="t"),
            by_operator=False,
        )

    async def finish_opened(self) -> None:
        for session in self.opened[:1]:
            begun = [user("hi")]
            first = sample(session, self.renderer, begun, say(self.renderer, "one"), version=self.version)
            for text in ("two", "else"):
                messages = [*begun, first.message, user(text)]
                sample(session, self.renderer, messages, say(self.renderer, text), version=self.version)
            num_tokens = sum(len(turn.ids) for turn in session.turns)
            self.finished[session.session_id] = num_tokens, self.version
            await endings.finish(self.run, session, FinishBody(status="finished", reward=1.0))

    async def finish_while_the_journal_is_compacted(self) -> None:
        async def compact() -> None:
            await self.run.compact()

        await asyncio.gather(self.finish_opened(), compact())

    async def fail_opened(self) -> None:
        for session in self.opened[:1]:
            sample(session, self.renderer, [user("hi")], say(self.renderer, "x"), version=self.version)
            await endings.finish(self.run, session, FinishBody(status="failed"))

    async def store(self) -> None:
        await self.store_of_run.store()

    async def store_without_record(self) -> None:
        """Write the rows without their journal record: a full disk, or a crash if a restart follows."""

        async def full(event: Any) -> None:
            raise OSError("no space left")

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(OSError):
            patch.setattr(self.run, "record_now", full)
            await self.store()


def check(driver: OpeningDriver) -> None:
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


@settings(max_examples=examples(25), deadline=None)
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=30))
@example(operations=["open", "open", "finish_while_the_journal_is_compacted", "restart"])
@example(
    operations=[
        *(["open"] * 4 + ["finish_opened", "play", "play", "seal", "publish", "finish_opened"]),
        *("store_without_record", "finish_opened", "restart", "finish_opened", "store"),
    ]
)
def test_every_finished_session_is_stored_once_wherever_storing_breaks_off(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async def scenario(folder: Path) -> None:
        driver = OpeningDriver(folder, model_dir, renderer)
        await driver.register()
        for operation in operations:
            await getattr(driver, operation)()
        await driver.restart()
        waiting = list(driver.run.state.results.opened)
        still_open = [s.session_id for s in driver.opened]
        await driver.restart()
        assert list(driver.run.state.results.opened) == waiting
        assert [session.session_id for session in driver.opened] == still_open
        await driver.plane.release(driver.run)
        check(driver)
        assert not driver.run.state.results.opened
        await driver.plane.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


def test_what_cannot_be_written_waits(
    tmp_path: Path, model_dir: str, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        driver = OpeningDriver(tmp_path, model_dir, renderer)
        await driver.register()
        in_the_way = tmp_path / "run" / "opened"
        in_the_way.touch()
        await driver.open()
        await driver.finish_opened()
        await driver.plane.release(driver.run)
        assert "1 opened sessions wait to be written: the session file of opened 0 cannot be" in caplog.text
        # a released run is served again until it has written all
        await driver.restart()
        in_the_way.unlink()
        driver.store_of_run.store_soon()
        await driver.store()
        check(driver)
        await driver.plane.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())


def test_the_journal_stays_bounded_where_no_batch_is_ever_sealed(
    tmp_path: Path, model_dir: str, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "SPARE_BYTES", 10_000)

    async def scenario() -> None:
        driver = OpeningDriver(tmp_path, model_dir, renderer)
        await driver.register()
        await driver.open()
        sizes = []
        for _ in range(60):
            await driver.open()
            await driver.finish_opened()
            await driver.store()
            sizes.append(driver.run.journal.path.stat().st_size)
        assert max(sizes) < 20_000
        still_open = [session.session_id for session in driver.opened]
        await driver.restart()
        assert [session.session_id for session in driver.opened] == still_open
        check(driver)
        await driver.plane.close()

    asyncio.run(scenario())


def test_a_session_is_found_by_its_id(tmp_path: Path, model_dir: str, renderer: Renderer) -> None:
    async def scenario() -> None:
        driver = OpeningDriver(tmp_path, model_dir, renderer)
        await driver.register()
        await driver.open()
        await driver.finish_opened()
        await driver.store()
        [session_id] = driver.finished
        sampling, branches = RunView(RunDirectory(str(tmp_path / "run"))).find_session(session_id)
        assert (sampling.label, len(branches)) == ("opened at version 0", 2)
        await driver.plane.close()

    asyncio.run(scenario())
