"""Why sessions fail, and what becomes of one that did. One rule for training and held-out sessions (design
5.11).

Owns the words that settings, statuses, manifests and metrics share. Who decides with them is
sf_core/dataplane/runs/rollout_manager.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from sf_core.config.base import Settings

Reason = Literal["context_overflow", "timeout", "agent_error", "unparsed_call", "not_recorded"]
"""The first four are settings. not_recorded: what was sampled could not be exported, which no setting makes a
reward of: it is tried again, then its group is left out."""

Rule = Literal["zero", "retry_then_zero", "retry_then_exclude"]

Status = Literal["finished", "finished_after_overflow"] | Reason
"""How a session ended. finished_after_overflow: with a reward as any other, and its last request did not fit
into the context window."""

Cause = Literal["agent", "reward", "time"]
"""What ended a session that failed: what the agent raised, what its scoring did, or that it ran too long."""

REASONS: tuple[Reason, ...] = get_args(Reason)


class FailureRules(Settings):
    """What becomes of a session that failed, by the reason. zero: it ends with `failed_reward`, what it
    sampled is trained on. retry_then_zero, retry_then_exclude: it is run again with other draws, up to
    `session_attempts` times in all; if it then still fails, it ends like zero, or its group is left out. One
    that failed before the policy had sampled anything cannot be trained on: it is run again, then left
    out."""

    context_overflow: Rule = "zero"
    """The agent ended in an error after a request that did not fit into `engine.context_length`."""
    timeout: Rule = "zero"
    """It ran longer than `session_timeout_s`."""
    agent_error: Rule = "retry_then_exclude"
    """The agent or the reward function raised, or the reward is no finite number."""
    unparsed_call: Rule = "zero"
    """The agent ended in an error after an answer of the policy with a tool call that could not be parsed.
    One that copes with it has not failed."""

    def rule_for(self, reason: Reason) -> Rule:
        rule: Rule = "retry_then_exclude" if reason == "not_recorded" else getattr(self, reason)
        return rule


def count_failures(statuses: Iterable[str]) -> dict[str, int]:
    """How many of these failed, by reason; those that did not are left out."""
    counts = Counter(statuses)
    return {reason: counts[reason] for reason in REASONS if counts[reason]}


def sum_failures(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for failures in several:
        total.update(failures)
    return dict(total)


def failures_text(failures: Mapping[str, Any]) -> str:
    """For a cell of a table."""
    return ", ".join(f"{reason} {number}" for reason, number in failures.items())
