"""The result of a session that has ended, kept in memory until its rows are stored. It includes the questions
that judges were asked for its reward, and the tokens that judges used.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np

from sf_core.config.rollout_config import Status
from sf_core.dataplane.api_schemas import FinishBody, RunSpec
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.export import export_session
from sf_core.dataplane.sessions.images import IMAGE_BYTES
from sf_core.dataplane.sessions.memory_budget import size_of_judgement
from sf_core.dataplane.sessions.session import Session
from sf_core.models.images.processor_config import ImageProcessorConfig
from storage.tables.judgements import Judgement
from storage.tables.schema import Trajectory


class Spent(Counter[str]):
    """Tokens that judges have used since the last batch, by the judges' names. After a restart of the
    process, tokens for sessions that the journal does not hold any more are missing."""

    def add(self, judgements: Iterable[Judgement]) -> None:
        for judgement in judgements:
            if judgement.judge is not None:
                self[judgement.judge] += judgement.tokens

    def explain_excess(self, budgets: Mapping[str, int]) -> str:
        """Why a run ends whose judges have used more tokens than allowed; empty if they have not."""
        excess = [
            f"judge {name} has used {self[name]} tokens since the last batch, but "
            f"environment.judges.{name}.max_tokens_per_iteration is {budget}: raise this setting and resume "
            "the run"
            for name, budget in budgets.items()
            if self[name] > budget
        ]
        return "; ".join(excess)


def summarise(judgements: Iterable[Judgement]) -> dict[str, Any]:
    """Means of noted values, and figures of each judge, as manifests store them."""
    noted = defaultdict[str, list[float]](list)
    judges = defaultdict[str, list[Judgement]](list)
    for judgement in judgements:
        if judgement.judge is not None:
            judges[judgement.judge].append(judgement)
        elif judgement.verdict is not None:
            noted[judgement.item].append(float(judgement.verdict))
    summary: dict[str, Any] = {}
    if noted:
        summary["noted"] = {name: float(np.mean(noted[name])) for name in sorted(noted)}
    if judges:
        summary["judges"] = {name: _describe(judges[name]) for name in sorted(judges)}
    return summary


def count_discarded(judgements: Iterable[Judgement]) -> Counter[str]:
    """Number of replies that did not count, by reason."""
    return Counter(reason for judgement in judgements for reason in judgement.discarded)


def _describe(rows: Sequence[Judgement]) -> dict[str, Any]:
    seconds = [row.seconds for row in rows if row.attempts]
    return {
        "calls": sum(row.attempts for row in rows),
        "tokens": sum(row.tokens for row in rows),
        "p95_seconds": float(np.percentile(seconds, 95)) if seconds else 0.0,
        # a reply came that could not be read
        "unread": sum(row.reply is not None and row.verdict is None for row in rows),
        # replies that were cut off, or are no answers, by reason
        "discarded": dict(sorted(count_discarded(rows).items())),
        "cached": sum(row.cached for row in rows),
        "agreement": _agreement(rows),
    }


def _agreement(rows: Sequence[Judgement]) -> float | None:
    """Share of comparisons whose two orders gave the same answer; None if nothing was compared."""
    pairs = defaultdict[int, list[bool]](list)
    for row in rows:
        if row.pair is not None and row.verdict is not None:
            scores = msgspec.json.decode(row.verdict, type=dict[str, float])
            pairs[row.pair].append(scores["A"] > scores["B"])
    answered_twice = [pair for pair in pairs.values() if len(pair) == 2]
    # the second order has the texts the other way round
    agreements = [first is not second for first, second in answered_twice]
    return float(np.mean(agreements)) if agreements else None


RESULT_BYTES = 600
TRAJECTORY_BYTES = 1000
SPAN_BYTES = 200
"""Measured memory of the objects, without tokens and texts."""

TOKEN_BYTES = 4 + 1 + 4 + 4
"""Memory of a token's id, mask, log-prob and version."""


@dataclass(slots=True, eq=False)
class FinishedSession:
    """A session that is over."""

    session_id: str
    claim: Claim | None
    """None for a session that belongs to no group."""
    reward: float | None
    """None: the answer was not judged."""
    environment: str
    min_version: int | None
    max_version: int | None
    """Oldest and newest policy version of a sampled token."""
    trajectories: Sequence[Trajectory]
    status: Status = "finished"
    error: str = ""
    """Message of the failure; empty without one."""
    report: str = ""
    """Digest of the report that ended the session; empty if a time limit did."""
    judgements: ClassVar[Sequence[Judgement]] = ()
    """Questions to judges for the reward and their replies, and noted values."""

    @property
    def num_bytes(self) -> int:
        rows = sum(map(_trajectory_bytes, self.trajectories))
        return RESULT_BYTES + rows + sum(map(size_of_judgement, self.judgements))


@dataclass(slots=True, eq=False)
class JudgedSession(FinishedSession):
    """A session for whose reward judges were asked, or with noted values."""

    judgements: list[Judgement] = field(default_factory=list)  # type: ignore[misc]


def _trajectory_bytes(trajectory: Trajectory) -> int:
    arrays = TOKEN_BYTES * len(trajectory.token_ids)
    objects = TRAJECTORY_BYTES + SPAN_BYTES * len(trajectory.turns)
    texts = sum(map(sys.getsizeof, (trajectory.messages, trajectory.tools, trajectory.output)))
    return arrays + objects + texts + IMAGE_BYTES * len(trajectory.images)


def finish_session(
    spec: RunSpec,
    session: Session,
    report: FinishBody,
    stop_ids: tuple[int, ...],
    image_processor: ImageProcessorConfig | None = None,
) -> FinishedSession:
    """The result of a session that is not served any more. The report has a reward, even for a failure,
    unless the answer could not be judged. `image_processor` is that of the policy, None if it is shown no
    images."""
    assert report.reward is not None or report.status == "unjudged"
    status = judge_status(session, report)
    trajectories = export_session(
        session,
        report,
        policy=spec.served_model,
        group_id=_group_id(spec, session),
        stop_ids=stop_ids,
        status=status,
        image_processor=image_processor,
    )
    versions = [turn.versions for turn in session.turns if len(turn.versions)]
    session.release()
    judgements = [*session.judgements, *report.judgements]
    make_result = partial(JudgedSession, judgements=judgements) if judgements else FinishedSession
    return make_result(
        session.session_id,
        session.claim,
        report.reward,
        report.environment or session.environment,
        min((int(sampled.min()) for sampled in versions), default=None),
        max((int(sampled.max()) for sampled in versions), default=None),
        trajectories,
        status,
        report=session.report,
    )


def _group_id(spec: RunSpec, session: Session) -> str | None:
    if (claim := session.claim) is None:
        return session.group
    return f"{spec.run_id}.g{claim.slot.group}" if claim.slot.split == "train" else None


def judge_status(session: Session, report: FinishBody) -> Status:
    """The status of a session that has ended. A failure that the policy may have caused shows in the last
    request: its prompt did not fit, or its answer had a call that could not be parsed."""
    if report.status == "unjudged":
        return "not_judged"
    if report.status == "finished":
        return "finished_after_overflow" if session.has_overflowed else "finished"
    match report.cause:
        case "time":
            return "timeout"
        case "prepare":
            return "prepare_error"
        case "reward":
            return "reward_error"
        case "code":
            return "agent_error"
    if session.has_overflowed:
        return "context_overflow"
    has_unparsed_call = bool(session.turns) and session.turns[-1].num_unparsed_calls > 0
    return "unparsed_call" if has_unparsed_call else "agent_error"
