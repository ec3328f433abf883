"""What judges said and what was noted: figures of manifests, and the judgements of one session."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow.compute as pc

from sf_core.config.rollout_config import failures_text
from sf_core.reports.iterations import Iteration
from sf_core.reports.sessions import SessionSet
from sf_core.reports.view import RunView
from storage.tables.judgements import Judgement, read_judgements

_SUMS = ("calls", "tokens", "cached", "unread")

FIGURES = ("calls", "tokens", "p95_seconds", "unread", "cached", "agreement")
"""Figures of a judge in a manifest, in the order of a table; and `discarded`, by reason."""


def judge_metrics(data: Mapping[str, Any]) -> dict[str, float]:
    """What a manifest of a rollout or an evaluation tells of judges and of what was noted, by the names of
    metrics; without what is not known."""
    metrics = {f"noted.{name}": mean for name, mean in data.get("noted", {}).items()}
    for judge, figures in data.get("judges", {}).items():
        for name in FIGURES:
            metrics[f"judge.{judge}.{name}"] = figures.get(name)
        for reason, number in figures.get("discarded", {}).items():
            metrics[f"judge.{judge}.discarded.{reason}"] = number
    metrics["unjudged"] = data.get("unjudged")
    return {name: float(value) for name, value in metrics.items() if value is not None}


def judge_rows(iterations: Iterable[Iteration]) -> list[dict[str, Any]]:
    """The figures of every judge in each iteration's batch, and in the evaluation of the version that it
    began with."""
    return [
        {"iteration": iteration.number, "sessions": kind, "judge": judge, **figures}
        for iteration in iterations
        for stage, kind in (("evaluate", "held-out"), ("rollout", "training"))
        if stage in iteration.stages
        for judge, figures in iteration.stages[stage].data.get("judges", {}).items()
    ]


def sum_judges(iterations: Iterable[Iteration]) -> list[str]:
    """What all batches and evaluations of these iterations tell of each judge, as sentences."""
    of_judge = defaultdict[str, list[dict[str, Any]]](list)
    for row in judge_rows(iterations):
        of_judge[row["judge"]].append(row)
    return [f"judge {name}: {_judge_sentence(own)}" for name, own in of_judge.items()]


def _judge_sentence(rows: list[dict[str, Any]]) -> str:
    calls, tokens, cached, unread = (sum(row[name] for row in rows) for name in _SUMS)
    slowest = max(row["p95_seconds"] for row in rows)
    agreeing = [row["agreement"] for row in rows if row["agreement"] is not None]
    discarded = sum((Counter(row.get("discarded", {})) for row in rows), Counter[str]())
    lost = f", {discarded.total():,} replies discarded: {failures_text(discarded)}" if discarded else ""
    orders = f", orders agree in {sum(agreeing) / len(agreeing):.0%}" if agreeing else ""
    return (
        f"{calls:,} calls, {tokens:,} tokens, {cached:,} questions known before, {unread:,} replies that "
        f"could not be read, 95 % of calls within {slowest:.2f} s{lost}{orders}"
    )


def judgements_of(view: RunView, session_set: SessionSet, session_id: str) -> list[Judgement]:
    """What judges were asked for the reward of a session of this set, in order. Raises ValueError if a file
    is missing or broken."""
    stage = {"trains iteration": "rollout", "evaluates version": "evaluate"}.get(session_set.kind)
    manifest = view.manifest(session_set.number, stage) if stage else None
    if manifest is None:
        return []
    table = read_judgements(view.run, manifest)
    rows = table.filter(pc.equal(table["session_id"], session_id))
    return [Judgement(**row) for row in rows.select(Judgement.__struct_fields__).to_pylist()]


def describe_judgement(judgement: Judgement) -> str:
    """A judgement in judgement line."""
    if judgement.judge is None:
        return f"{judgement.item} {judgement.verdict}"
    verdict = judgement.verdict or (
        "no reply" if judgement.reply is None else f"{judgement.reply}, which could not be read"
    )
    cost = (
        "known before"
        if judgement.cached
        else f"{judgement.tokens} tokens, {judgement.attempts} calls, {judgement.seconds:.2f} s"
    )
    if judgement.discarded:
        cost += f"; discarded replies: {failures_text(Counter(judgement.discarded))}"
    return " ".join(filter(None, (judgement.item, verdict, f"({cost})")))
