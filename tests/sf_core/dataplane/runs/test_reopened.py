"""What a run restored from its journal holds."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from openai import OpenAI

from sf_core.dataplane.api_schemas import FinishBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.journal.journal_file import frames, payload
from sf_core.dataplane.runs.events import Registered, RunEvent, read_event
from sf_core.dataplane.runs.recovery import reopen_run
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.export import export_session, session_tree
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench.dataplane import planes
from tests.bench.waits import wait_until


def test_the_journal_of_a_long_run_stays_bounded(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    """Turns of sealed sessions are dropped; what is left is enough for a restart."""
    served_plane.register(groups_per_batch=1, group_size=1)
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "ok"))
    journal = served_plane.run_dir / "run" / "journal" / "run.journal"
    sizes = []
    for batch in range(6):
        [claim, *_] = served_plane.claim(1)
        planes.converse(served_plane, claim, 5, streamed=True)
        planes.finish(served_plane, claim)
        served_plane.post(f"/runs/run/batches/{batch}/seal", {"attempt": 1})
        served_plane.post("/runs/run/weights", {"version": batch + 1, "uri": "w"})
        sizes.append(journal.stat().st_size)
    assert sizes[-1] < 1.2 * sizes[1]
    [open_claim] = served_plane.claim(1)
    planes.converse(served_plane, open_claim, 2, streamed=True)
    run = reopened(journal)
    assert (run.state.ledger.next_batch, run.router.weights.version) == (6, 6)
    assert list(run.sessions) == [open_claim["session_id"]]
    assert len(run.sessions[open_claim["session_id"]].turns) == 2
    assert run.state.ledger.list_done_before(6) == list(range(6))
    assert isinstance(first_event(journal), Registered)


def first_event(journal: Path) -> RunEvent:
    with journal.open("rb") as file:
        return read_event(payload(next(frames(file))))


def test_a_reopened_session_is_trained_on_as_the_living_one(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    """The whole tree comes back: extensions, edited histories, repeated requests, several samples, calls that
    were asked for, and prompts of ids; nothing remains of a prompt that was refused."""
    served_plane.register(group_size=1, groups_per_batch=1)
    served_plane.connect(lambda prompt, seed: planes.say(renderer, f"answer {seed % 1000}"))
    [claim] = served_plane.claim()
    one = [{"role": "user", "content": "one"}]
    with OpenAI(
        base_url=f"{served_plane.url}/sessions/{claim['session_id']}/v1", api_key=claim["key"]
    ) as agent:
        first = [{"role": "assistant", "content": planes.ask(agent, one)}]
        planes.ask_stream(agent, [*one, *first, *one])
        planes.ask(agent, [*one, *first, *one, *first, *one])
        planes.ask_stream(agent, [*one, *first, {"role": "user", "content": "two"}])
        planes.ask(agent, one)
        planes.ask(agent, [{"role": "system", "content": "other"}, *one])
        agent.chat.completions.create(model="policy", messages=one, n=2)
        calc: Any = {"tools": [planes.CALC], "tool_choice": "required"}
        agent.chat.completions.create(model="policy", messages=one, **calc)
        with pytest.raises(openai.BadRequestError):
            agent.completions.create(model="policy", prompt=[5] * 3000)
        agent.completions.create(model="policy", prompt=[5] * 30)
        agent.completions.create(model="policy", prompt=list(served_plane.asked[1].prompt_ids)[:-2])
    tree = served_plane.get(f"/sessions/{claim['session_id']}")
    run = reopened(served_plane.run_dir / "run" / "journal" / "run.journal")
    session = run.sessions[claim["session_id"]]
    assert session_tree(run.spec, session) == tree
    assert [prompt["num_tokens"] for prompt in tree["prompts"]].count(3000) == 0
    report = FinishBody(status="finished", reward=1.0, task_id="t", environment="test")
    stop_ids = renderer.stop_token_ids
    exported = export_session(session, report, policy="policy", group_id="run.g0", stop_ids=stop_ids)
    planes.finish(served_plane, claim)
    counters = served_plane.get("/runs/run")["counters"]
    assert {f"branches.{name}": n for name, n in session.branch_reasons.items()} == {
        name: n for name, n in counters.items() if name.startswith("branches.")
    }
    sealed = served_plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    rows = to_rows(read_trajectories(str(Path(served_plane.run_dir, "run", sealed["files"][0]["uri"]))))
    assert len(rows) == len(exported) == len(tree["turns"]) - 1
    for row, again in zip(rows, exported, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs", "policy_versions"):
            np.testing.assert_array_equal(getattr(row, name), getattr(again, name))
        for name in ("branch_id", "parent_branch_id", "shared_prefix", "messages", "interruptions"):
            assert getattr(row, name) == getattr(again, name)


def reopened(journal: Path) -> ServedRun:
    """The run that another data plane would find if this one died now."""

    async def reopen() -> ServedRun:
        run = await reopen_run(copy, 10.0, MemoryBudget())
        assert run is not None
        await copy.close()
        return run

    copy = Journal(Path(shutil.copy(journal, journal.with_name("copy.journal"))))
    return asyncio.run(reopen())


def test_a_turn_nobody_waits_for_is_kept_but_never_trained(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(group_size=1, groups_per_batch=1, max_tokens=2000, context_length=10_000)
    long = renderer.encode("the " * 500).tolist() * 4
    served_plane.connect(
        lambda prompt, seed: long if len(served_plane.asked) == 1 else planes.say(renderer, "short")
    )
    [claim] = served_plane.claim()
    base = f"{served_plane.url}/sessions/{claim['session_id']}/v1"
    with OpenAI(base_url=base, api_key=claim["key"], max_retries=0) as agent:
        hello: Any = [{"role": "user", "content": "hello"}]
        chunks = iter(agent.chat.completions.create(model="policy", messages=hello, stream=True))
        next(chunks)
        next(chunks)
    wait_until(lambda: served_plane.get("/runs/run")["counters"].get("abandoned_turns") == 1)
    planes.converse(served_plane, claim, 2, streamed=False)
    session = reopened(served_plane.run_dir / "run" / "journal" / "run.journal").sessions[claim["session_id"]]
    [abandoned] = session.abandoned
    assert 0 < len(abandoned.ids) < len(long)
    assert abandoned.ids.tolist() == long[: len(abandoned.ids)]
    assert abandoned.finish_reason == "abort"
    planes.finish(served_plane, claim)
    sealed = served_plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    assert sealed["sampled_tokens"] == 2 * len(planes.say(renderer, "short"))


def test_a_run_whose_journal_another_version_wrote_is_refused_with_a_sentence(
    served_plane: planes.ServedPlane,
) -> None:
    served_plane.register()
    journal = served_plane.run_dir / "run" / "journal" / "run.journal"
    other = journal.with_name("other.journal")

    async def write(spec: dict[str, Any]) -> None:
        by_then = Journal(other)
        await by_then.append(msgspec.Raw(msgspec.msgpack.encode(["registered", spec, 1])))
        await by_then.close()

    spec = first_event(journal).spec.model_dump(mode="json")
    asyncio.run(write(spec | {"run_id": "other", "key": "a key of another time", "group_size": "several"}))
    response = served_plane.http.post("/runs", json=spec | {"run_id": "other"})
    assert response.status_code == 409
    told = response.json()["error"]["message"]
    assert "other.journal was written by another version of SeamlessFlow: group_size: " in told
    assert "a key" not in told
    other.unlink()
    served_plane.register(run_id="other")
