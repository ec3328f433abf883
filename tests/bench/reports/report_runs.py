"""Runs for the report, and its page in a browser."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from playwright.sync_api import Browser, Page

from sf_core.scheduling.timeline import Span
from storage.run_directory import STAGES, RunDirectory
from storage.tables.batches import write_batch
from storage.tables.outcomes import write_outcomes
from storage.tables.schema import NOT_SAMPLED, Trajectory, TurnSpan
from storage.tables.trajectories import read_trajectories, write_trajectories
from tests.bench.pages import new_page
from tests.bench.reports.spans import write_spans
from tests.bench.reports.tables import trajectory
from tests.bench.runs import commit, mean_reward

AT = 1000.0
"""A time in the past, so that all spans count as written."""

HOSTILE = "</script><img src='https://example.org/' onerror='document.title=`owned`'>"
EOS = 256
"""Id of the end of turn; ids 0 to 255 are bytes."""


@contextmanager
def opened(browser: Browser, page_file: str, **settings: Any) -> Iterator[Page]:
    """The page after drawing. Checks at the end that it requested only itself and logged nothing."""
    with new_page(browser, viewport={"width": 1240, "height": 900}, **settings) as page:
        asked = []
        said = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"file://{page_file}")
        page.wait_for_selector("html[data-ready]")
        yield page
        assert said == []
        assert {url.split("#")[0] for url in asked} == {f"file://{page_file}"}


def talk(session: str, said: str, answer: str, versions: list[int], **changes: Any) -> Trajectory:
    """A question and its answer, one byte per token; the versions sampled equal parts of the answer."""
    given = list(said.encode())
    sampled = [*answer.encode(), EOS]
    shares = np.array_split(np.arange(len(sampled)), len(versions))
    by = np.concatenate([np.full(len(share), v) for share, v in zip(shares, versions, strict=True)])
    turns = [
        TurnSpan("user", 0, len(given)),
        TurnSpan("assistant", len(given), len(given) + len(sampled), "stop", "e-r0", 1.0, 1.0, 0),
    ]
    row = {"turns": turns, "token_ids": np.array([*given, *sampled], np.int32), "branch_id": f"{session}.0"}
    return trajectory(session, [NOT_SAMPLED] * len(given) + by.tolist(), **(row | changes))


def goes_on(first: Trajectory, shared: int, said: str, answer: str, version: int) -> Trajectory:
    """A second branch: the first `shared` tokens of `first`, then its own question and answer."""
    more = talk(first.session_id, said, answer, [version])
    own = [TurnSpan(t.role, t.start + shared, t.end + shared, t.finish_reason, t.engine) for t in more.turns]
    mine = {
        name: np.concatenate([getattr(first, name)[:shared], getattr(more, name)])
        for name in ("token_ids", "logprobs", "policy_versions")
    }
    carried = np.zeros(shared, np.bool_)
    return trajectory(
        first.session_id,
        mine["policy_versions"].tolist(),
        **mine,
        loss_mask=np.concatenate([carried, more.loss_mask]),
        branch_id=f"{first.session_id}.1",
        parent_branch_id=first.branch_id,
        shared_prefix=shared,
        turns=[*(turn for turn in first.turns if turn.end <= shared), *own],
    )


def commit_iteration(
    run: RunDirectory,
    number: int,
    rows: list[Trajectory],
    left: Sequence[dict[str, Any]] = (),
    **told_more: Any,
) -> None:
    """Commit an iteration of ten seconds on device t0; `left` are the outcomes of groups that left, and
    `told_more` is what the rollout of a run that chooses tells besides."""
    at = AT + 10 * number
    sampled = write_trajectories(run, number, rows, "part")
    table = read_trajectories(run.path(sampled.uri))
    batch = write_batch(
        run,
        number,
        table,
        advantages=[np.zeros(len(ids), np.float32) for ids in table["token_ids"].to_pylist()],
        weights=[np.ones(len(ids), np.float32) for ids in table["token_ids"].to_pylist()],
        decisions=["train"] * len(table),
        part="part",
    )
    outcomes = [write_outcomes(run, number, left, "part")] if left else []
    outputs = {"rollout": [sampled, *outcomes], "filter": [batch]}
    told: dict[str, dict[str, Any]] = {
        "rollout": {
            "rejected": {"7": "too old"},
            "failures": {},
            "sampled_tokens": 70,
            "reward_mean": mean_reward(rows),
        }
        | told_more,
        "filter": {"lags": [30]},
        "train": {"entropy": 1.5, "teacher_kl": 0.25},
    }
    for stage in STAGES:
        data = {"started_at": at, "finished_at": at + 10} | told.get(stage, {})
        commit(run, number, stage, outputs=outputs.get(stage, []), data=data)
    write_spans(
        run,
        Span("t0", "rollout", at, at + 5, "held", lease=f"t0-{number}"),
        Span("t0", "rollout", at + 1, at + 4, "busy", "sample", number, f"t0-{number}", 100),
    )
