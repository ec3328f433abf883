"""Why sessions fail and what happens to a failed one, alike for training and held-out sessions.

Owns the words that settings, statuses, manifests and metrics share. The decisions are made in
sf_core/dataplane/runs/decide.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from sf_core.settings import Settings

# fmt: off
Reason = Literal[
    "context_overflow", "timeout", "agent_error", "unparsed_call", "reward_error",
    "prepare_error", "not_recorded",
]
# fmt: on
"""Reason why a session failed. The settings have no rule for the last two reasons: these sessions are
retried, and then excluded. prepare_error: the environment of the session could not be prepared. not_recorded:
the session could not be exported."""

Rule = Literal["zero", "retry_then_zero", "retry_then_exclude"]

Status = Literal["finished", "finished_after_overflow", "not_judged"] | Reason
"""Status with which a session ended. finished_after_overflow: the session has an ordinary reward, although
its last request did not fit into the context window. not_judged: a held-out session without a reward, because
no reward could be computed."""

Cause = Literal["prepare", "agent", "code", "time", "reward", "group"]
"""Event that ended a failed session: an error while the session was prepared, an error of the agent (`code`:
an error that no answer of the policy excuses), the time limit of the agent, or an error of scoring. group:
the session has not failed, but `environment.group_reward` drops its group."""

CODE_ERRORS = (NameError, TypeError, AttributeError, ImportError, SyntaxError)
"""Errors that are always errors of the agent itself, whatever the policy has answered."""

LOST_IMAGE = "lost_picture"
"""The `decision` on a session if one of its images is missing or has changed when the batch is written."""

REASONS: tuple[Reason, ...] = get_args(Reason)


class FailureRules(Settings):
    """Rule for a failed session, by the reason of the failure. zero: the session ends with the reward
    `failed_reward`, and its sampled tokens are trained on. retry_then_zero: the session is retried with other
    random draws, up to `session_attempts` attempts in total; if all attempts fail, the rule zero applies.
    retry_then_exclude: the session is retried in the same way; if all attempts fail, the group of the session
    is excluded from the batch. A session that failed before the policy sampled a token always follows
    retry_then_exclude."""

    context_overflow: Rule = "zero"
    """Rule for a session whose agent raised an error after a request that did not fit into
    `engine.context_length`."""
    timeout: Rule = "zero"
    """Rule for a session that ran longer than `session_timeout_s`."""
    agent_error: Rule = "retry_then_exclude"
    """Rule for a session whose agent raised an error to which no other rule applies. This rule always applies
    to errors in the agent's code (NameError, TypeError, AttributeError, ImportError, SyntaxError)."""
    unparsed_call: Rule = "zero"
    """Rule for a session whose agent raised an error after the policy wrote a tool call that could not be
    parsed. If the agent raises no error after such a call, the session has not failed."""
    reward_error: Rule = "retry_then_exclude"
    """Rule for a session whose reward function raised an error, exceeded `score_timeout_s`, or returned a
    number that is not finite. This rule also applies if an external agent sent no reward within
    `reward_patience_s`."""

    def rule_for(self, reason: Reason) -> Rule:
        return getattr(self, reason, "retry_then_exclude")


def count_failures(statuses: Iterable[str]) -> dict[str, int]:
    """Number of failed sessions by reason; reasons that do not occur are left out."""
    counts = Counter(statuses)
    return {reason: counts[reason] for reason in REASONS if counts[reason]}


def sum_failures(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, several), Counter[str]()))


def failures_text(failures: Mapping[str, Any]) -> str:
    """Failures by reason as the text of a table cell."""
    return ", ".join(f"{reason} {number}" for reason, number in failures.items())
