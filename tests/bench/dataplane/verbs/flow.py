"""What the flow of a run asks for: batches, weights, evaluations, pauses, and further attempts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.runs import decide
from sf_core.types import WeightsRef
from storage.files import FileRef
from storage.manifests import Manifest
from storage.run_directory import RunDirectory
from storage.tables.judgements import read_judgements
from storage.tables.outcomes import SCHEMA
from storage.tables.parquet import read_table
from storage.tables.schema import Trajectory
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench.dataplane.verbs.served import Served
from tests.bench.runs import commit


class Flow(Served):
    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.spec["run_dir"])

    # --- batches

    async def seal_batch(self, batch: int) -> dict[str, Any]:
        return await self.plane.sealers["run"].seal_batch(batch, self.spec["attempt"])

    async def seal(self) -> None:
        """Seal the next batch if it is ready."""
        ledger = self.ledger
        if not decide.readiness(ledger, ledger.next_batch).ready:
            return
        await self.seal_batch(ledger.next_batch)
        if not self.run.spec.rollout.chooses:
            batch = ledger.batches[ledger.next_batch - 1]
            self.untold |= {*batch.groups, *batch.rejected}

    async def seal_evaluation(self, version: int) -> dict[str, Any]:
        self.written.add(version)
        return await self.plane.sealers["run"].seal_evaluation(version, self.spec["attempt"])

    async def commit(self) -> None:
        """Commit the rollout of the last sealed batch."""
        last = self.ledger.next_batch - 1
        if last < 0 or self.directory.read_manifest(last, "rollout") is not None:
            return
        answer = dict(await self.seal_batch(last))
        files = [FileRef(**ref) for ref in (*answer.pop("files"), *answer.pop("outcomes", ()))]
        commit(self.directory, last, "rollout", outputs=files, data=answer)

    async def commit_and_seal(self) -> None:
        await self.commit()
        await self.seal()

    async def iterate(self, next_batch: int) -> None:
        """Work until this batch is the next one."""
        while self.ledger.next_batch < next_batch:
            await self.do("play", "commit_and_seal", "publish")
        await self.commit()

    async def publish(self) -> None:
        if self.version < self.ledger.next_batch:
            await self.plane.publish(self.run, WeightsRef(self.version + 1, "w"))

    def trajectories(self, sealed: dict[str, Any]) -> list[Trajectory]:
        """The rows of a batch."""
        [file] = sealed["files"]
        return to_rows(read_trajectories(self.directory.path(file["uri"])))

    def outcomes(self, sealed: dict[str, Any]) -> list[dict[str, Any]]:
        """The table of outcomes of a batch."""
        [ref] = sealed["outcomes"]
        return list(read_table(self.directory.path(ref["uri"]), SCHEMA.names, SCHEMA).to_pylist())

    def judgements(self, sealed: dict[str, Any], stage: str = "rollout") -> list[dict[str, Any]]:
        """The table of judgements that the manifest of this answer names."""
        files = [FileRef(**ref) for ref in sealed.get("judgements", ())]
        manifest = Manifest(run_id="run", iteration=0, stage=stage, attempt=1, outputs=files)
        return read_judgements(self.directory, manifest).to_pylist()

    # --- sessions that are of no group

    async def store(self) -> None:
        await self.plane.stores["run"].store()

    async def store_without_record(self) -> None:
        """Write the rows without their journal record: a full disk, or a crash if a restart follows."""

        async def full(event: Any) -> None:
            raise OSError("no space left")

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(OSError):
            patch.setattr(self.run, "record_now", full)
            await self.store()

    # --- commands

    async def evaluate(self, num_tasks: int = 2) -> None:
        await self.run.start_evaluation(self.version, num_tasks)

    async def pause(self) -> None:
        await self.run.pause("freeze", None)

    async def resume(self) -> None:
        await self.run.resume(None)

    async def pause_engine(self) -> None:
        engine = EngineConnection("engine", "lease", "worker", 1, 8, lambda frame: None)
        self.run.router.add(engine)
        await self.run.pause("evacuate", "engine")
        self.run.router.disconnect(engine)

    async def resume_engine(self) -> None:
        await self.run.resume("engine")

    async def revoke(self) -> None:
        await self.plane.revoke(self.run, f"lease {next(self.numbers)}")

    # --- attempts

    async def begin_attempt(self, **changes: Any) -> None:
        at = {"attempt": self.spec["attempt"] + 1, "iteration": self.ledger.next_batch}
        await self.register(**at | changes)

    async def go_on_after_release(self) -> None:
        await self.plane.release(self.run)
        await self.begin_attempt()

    async def begin_anew(self) -> None:
        at = self.spec["attempt"] + 1
        progress = {"iteration": 0, "version": 0, "done_groups": []}
        await self.register(attempt=at, origin=f"made by {at}", **progress)

    async def start_over(self) -> None:
        """The flow goes on at a batch that the data plane has never heard of."""
        self.has_started_over = True
        iteration = self.ledger.next_batch + 2
        await self.begin_attempt(iteration=iteration, version=max(iteration, self.version))

    async def go_back(self) -> None:
        """The flow has lost its last two iterations."""
        await self.commit()
        iteration = max(0, self.ledger.next_batch - 2)
        for lost in range(iteration, self.ledger.next_batch):
            (Path(self.spec["run_dir"]) / f"manifests/{lost:05d}/rollout.json").unlink(missing_ok=True)
        done = []
        for number in range(iteration):
            manifest = self.directory.read_manifest(number, "rollout")
            assert manifest is not None
            done += [*manifest.data["groups"], *map(int, manifest.data["rejected"])]
        await self.begin_attempt(iteration=iteration, version=iteration, done_groups=sorted(done))

    async def choose(self) -> None:
        """A later attempt begins to choose, and another one ends that."""
        chosen = self.spec["rollout"].get("curriculum") is not None
        # under another gate, compacted, the end of a group would be judged anew
        await self.begin_attempt(curriculum=None if chosen else {"pool": 30, "solved": 0.0})
