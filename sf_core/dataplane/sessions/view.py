"""A session's turn tree as JSON, for people and tools that inspect it."""

from __future__ import annotations

from typing import Any

from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.sessions.session import Prompt, Session, Turn

_NO_REWARD: dict[str, Any] = {"reward": None, "reward_parts": {}, "step_rewards": {}}
"""The fields of a session without a reward so far."""


def session_tree(spec: RunSpec, session: Session) -> dict[str, Any]:
    """Prompts and turns refer to each other by their positions in the two lists."""
    turn_indices = {turn: i for i, turn in enumerate(session.turns)}
    claim = session.claim
    return {
        "session_id": session.session_id,
        "run_id": spec.run_id,
        "policy": spec.served_model,
        "split": None if claim is None else claim.slot.split,
        "group": session.group if claim is None else claim.slot.group,
        "task_id": session.task_id,
        "environment": session.environment,
        "metadata": session.metadata,
        **(_NO_REWARD if session.earned is None else session.earned.model_dump()),
        "started_at": session.started_at,
        "turns_running": len(session.running),
        "branch_reasons": dict(session.branch_reasons),
        "prompts": [_describe_prompt(prompt, turn_indices) for prompt in session.prompts],
        "turns": [_describe_turn(turn) for turn in session.turns],
    }


def _describe_prompt(prompt: Prompt, turn_indices: dict[Turn, int]) -> dict[str, Any]:
    return {
        "parent_turn": None if prompt.continues is None else turn_indices[prompt.continues],
        "num_tokens": prompt.end,
        "num_new_tokens": len(prompt.ids),
        "messages": prompt.messages,
        "branch_reason": prompt.branch_reason,
    }


def _describe_turn(turn: Turn) -> dict[str, Any]:
    versions = turn.versions
    return {
        "prompt": turn.prompt.index,
        "message": turn.message,
        "num_tokens": len(turn.ids),
        "versions": [int(versions.min()), int(versions.max())] if len(versions) else None,
        "finish_reason": turn.finish_reason.value,
        "engine": turn.engine,
        "interruptions": turn.interruptions,
        "unparsed_calls": turn.num_unparsed_calls,
    }
