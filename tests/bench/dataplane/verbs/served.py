"""One run at a data plane in the test's own event loop, and what all verbs need of it."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sf_core.dataplane.api_schemas import ClaimBody, FinishBody, RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs import claiming, endings
from sf_core.dataplane.runs.events import read_event
from sf_core.dataplane.runs.ledger import Ledger
from sf_core.dataplane.runs.recovery import reopen_run
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.turn_events import Begun, Delivered, NewPrompt, TurnEnded, TurnKey
from tests.bench.dataplane import conversations
from tests.bench.dataplane.planes import say
from tests.bench.dataplane.specs import SPEC, changed
from tests.bench.dataplane.verbs.surviving import check_same, memory, surviving


class Served:
    """A run that is served without HTTP. Names of runners are without the number of their attempt."""

    def __init__(self, folder: Path, model_dir: str, renderer: Renderer) -> None:
        self.spec = changed(SPEC, run_dir=str(folder / "run"), model_dir=model_dir, gate="varied")
        self.folder = folder
        self.renderer = renderer
        self.options = DataplaneOptions(str(folder / "plane"))
        self.plane = DataPlane(self.options)
        self.numbers = itertools.count()
        self.untold: set[int] = set()
        """Groups that were sealed without a file of outcomes, which a later curriculum forgets."""
        self.written: set[int] = set()
        """Versions whose evaluations are written."""
        self.has_started_over = False
        """Whether the flow went on at a batch that the data plane had never heard of."""
        self.given_with: dict[str, int] = {}
        """How many answers of its group a runner was given with that of each session, the last time."""

    @property
    def run(self) -> ServedRun:
        return self.plane.runs["run"]

    @property
    def ledger(self) -> Ledger:
        return self.run.state.ledger

    @property
    def version(self) -> int:
        return self.run.router.weights.version

    @property
    def runner(self) -> str:
        """Name of the runner of agents."""
        return f"a{self.spec['attempt']}"

    @property
    def given_out(self) -> list[Session]:
        """Sessions of runners."""
        return [session for session in self.run.sessions.values() if not session.is_external]

    def of(self, name: str) -> list[Session]:
        """Sessions of this runner."""
        return [s for s in self.run.sessions.values() if s.runner == f"{name}{self.spec['attempt']}"]

    async def do(self, *operations: str) -> None:
        for operation in operations:
            await getattr(self, operation)()

    # --- the data plane

    async def register(self, **changes: Any) -> None:
        """Register the run with these changes to its last registration."""
        spec = changed(self.spec, **changes)
        await self.plane.register(RunSpec.model_validate(spec))
        self.spec = spec

    async def move(self, folder: str, **options: Any) -> None:
        """Go on at another data plane, which knows of no run."""
        await self.plane.close()
        self.options = DataplaneOptions(str(self.folder / folder), **options)
        self.plane = DataPlane(self.options)

    async def restart(self, while_down: Callable[[], object] = lambda: None) -> None:
        await self.plane.close()
        while_down()
        self.plane = DataPlane(self.options)
        await self.plane.reopen()

    def state(self) -> dict[str, Any]:
        """All that a restart has to find of the runs that it opens."""
        is_open = {name: run for name, run in self.plane.runs.items() if not run.is_at_rest}
        return {name: self.known(run) | self.kept(run) for name, run in is_open.items()}

    def known(self, run: ServedRun) -> dict[str, Any]:
        """What a journal has, also if it was compacted."""
        found = surviving(run)
        for slot in [slot for slot in found["results"] if slot.split == "holdout"]:
            # a run forgets those of an evaluation that is written, but not its journal
            if slot.group in self.written:
                del found["results"][slot]
        if self.has_started_over:
            # starting over may find another reason for which a group had to go
            found["rejected"] = sorted(found["rejected"])
        return found

    def kept(self, run: ServedRun) -> dict[str, Any]:
        """What only a journal has that was not compacted, or the run directory."""
        # of groups that had to go by starting over, it is not known what they were
        remembered = {} if self.has_started_over else memory(run.state.ledger, self.untold)
        return {"fault": run.fault, **remembered}

    async def check_restart(self) -> None:
        """A restart finds what there was, with the journal as it is and with a compacted one. Only a group of
        which some answers were scored does not outlive the runner that scored them."""
        before = self.state()
        was_whole = not self.has_half_judged
        for run in self.plane.runs.values() if was_whole else ():
            await self.check_snapshot(run)
        await self.restart()
        if was_whole:
            check_same(before, self.state())
        assert not self.has_half_judged

    @property
    def has_half_judged(self) -> bool:
        """Whether some answers of a group were scored, and the others are still with their judge."""
        ledgers = [run.state.ledger for run in self.plane.runs.values() if run.spec.judges_groups]
        return any(group.is_half_judged for ledger in ledgers for group in ledger.groups.values())

    async def check_snapshot(self, run: ServedRun) -> None:
        """A restart after a compaction finds the same: replay(snapshot(state)) == state."""
        await run.journal.flush()
        written = [event async for event in run.journal.replay(read_event)]
        head, keep = run.state.snapshot()
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            journal = Journal(Path(folder) / "run.journal")
            for event in (*head, *filter(keep, written)):
                journal.append_later(event)
            await journal.flush()
            again = await reopen_run(journal, 10.0, MemoryBudget())
            assert again is not None
            await journal.close()
        check_same(self.known(run), self.known(again))

    async def check_answers(self) -> None:
        """The next runner is given all answers, but for those that wait for others of their group."""
        for run in self.plane.runs.values():
            if run.fault or run.released:
                continue
            due = {session.session_id for session in run.sessions.values() if _is_due(run, session)}
            body = ClaimBody(runner="the next", max=len(due), work="reward", running=[])
            given = (await claiming.claim(run, body))[0]
            assert {session.session_id for session in given} == due

    # --- runners

    async def claimed(self, name: str, limit: int, *running: str, work: Any = "agent") -> list[Session]:
        """What a runner is given that has these sessions."""
        body = ClaimBody(runner=f"{name}{self.spec['attempt']}", max=limit, work=work, running=list(running))
        sessions = (await claiming.claim(self.run, body))[0]
        groups = Counter(s.claim.slot.group for s in sessions if s.claim and s.answer is not None)
        self.given_with |= {s.session_id: groups[s.claim.slot.group] for s in sessions if s.claim}
        return sessions

    def sample(self, session: Session, ids: Sequence[int] | None = None, *before: Any) -> conversations.Turn:
        """Have the policy answer `hi`, or what follows these messages, as the journal records it."""
        messages = list(before) or [conversations.user("hi")]
        ids = say(self.renderer, "x") if ids is None else list(ids)
        if session.claim is not None:
            self.run.note_started(session.claim, self.version)
        turn = conversations.sample(session, self.renderer, messages, list(ids), version=self.version)
        prompts = [NewPrompt.from_prompt(prompt) for prompt in session.pop_unrecorded_prompts()]
        key = TurnKey(session.session_id, turn.prompt.index, turn.sample)
        for event in (Begun(key, 0, b"", prompts), TurnEnded.from_turn(key, turn, 0), Delivered(key)):
            self.run.journal.append_later(event)
        return turn

    async def end(
        self, session: Session, reward: float | None = 1.0, ids: Sequence[int] | None = None, **report: Any
    ) -> None:
        """End a session in which the policy answers first; without a reward it fails."""
        self.sample(session, ids)
        status = "failed" if reward is None else "finished"
        await self.report(session, status=status, reward=reward, **report)

    async def report(self, session: Session, **report: Any) -> None:
        await endings.finish(self.run, session, FinishBody.model_validate(report))

    async def report_all(self, sessions: Sequence[Session], **report: Any) -> None:
        """Report the same on all of these sessions at once."""
        await asyncio.gather(*(self.report(session, **report) for session in sessions))


def _is_due(run: ServedRun, session: Session) -> bool:
    """Whether its answer can be scored: with those of its group, if these are scored together."""
    if session.answer is None or session.is_external:
        return False
    group = run.state.ledger.train_group_of(session.claim)
    if group is None or not run.state.judges(session):
        return True
    return len(run.state.list_answered(group)) == group.num_left
