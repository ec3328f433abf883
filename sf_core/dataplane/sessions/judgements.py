"""Figures of the questions that judges were asked for rewards, and the tokens that judges have used."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from storage.tables.judgements import Judgement


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
