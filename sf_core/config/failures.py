"""Why sessions fail and what happens to a failed one, alike for training and held-out sessions.

Owns the words that settings, statuses, manifests and metrics share. The decisions are made in
sf_core/dataplane/runs/rollout_manager.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from sf_core.config.base import Settings

Reason = Literal["context_overflow", "timeout", "agent_error", "unparsed_call", "not_recorded"]
"""Why a session failed. The first four have a rule in the settings. not_recorded: the session could not be
exported; it has the fixed rule retry_then_exclude."""

Rule = Literal["zero", "retry_then_zero", "retry_then_exclude"]

Status = Literal["finished", "finished_after_overflow"] | Reason
"""How a session ended. finished_after_overflow: it has an ordinary reward, although its last request did not
fit into the context window."""

Cause = Literal["agent", "reward", "time"]
"""What ended a failed session: an error of the agent, an error of its scoring, or the time limit."""

REASONS: tuple[Reason, ...] = get_args(Reason)


class FailureRules(Settings):
    """What happens to a failed session, by reason. zero: it ends with `failed_reward`, and its sampled tokens
    are trained on. retry_then_zero, retry_then_exclude: it is retried with other random draws, up to
    `session_attempts` attempts in all; if all fail, it ends like zero, or its group is excluded. A session
    that failed before the policy had sampled anything cannot be trained on: it is retried, then excluded."""

    context_overflow: Rule = "zero"
    """The agent raised an error after a request that did not fit into `engine.context_length`."""
    timeout: Rule = "zero"
    """The session ran longer than `session_timeout_s`."""
    agent_error: Rule = "retry_then_exclude"
    """The agent or the reward function raised another error, or the reward is not a finite number."""
    unparsed_call: Rule = "zero"
    """The agent raised an error after an answer of the policy with a tool call that could not be parsed. An
    agent that recovers from such an answer has not failed."""

    def rule_for(self, reason: Reason) -> Rule:
        rule: Rule = "retry_then_exclude" if reason == "not_recorded" else getattr(self, reason)
        return rule


def count_failures(statuses: Iterable[str]) -> dict[str, int]:
    """Number of failed sessions by reason; reasons that do not occur are left out."""
    counts = Counter(statuses)
    return {reason: counts[reason] for reason in REASONS if counts[reason]}


def sum_failures(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for failures in several:
        total.update(failures)
    return dict(total)


def failures_text(failures: Mapping[str, Any]) -> str:
    """Failures by reason as the text of a table cell."""
    return ", ".join(f"{reason} {number}" for reason, number in failures.items())
