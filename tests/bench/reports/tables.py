"""Trajectories and batches, and what is shown of them."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console, RenderableType

from storage.tables.schema import NOT_SAMPLED, Trajectory, TurnSpan

WORDS = ["what", "is", "six", "times", "seven", "calc", "42", "</s>", "thanks"]


def shown(view: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined]


def trajectory(session: str, versions: list[int], **changes: Any) -> Trajectory:
    array = np.array(versions, np.int32)
    sampled = array != NOT_SAMPLED
    row = Trajectory(
        policy="policy",
        task_id="calculator-1",
        environment="calculator",
        group_id="g0",
        session_id=session,
        branch_id="0",
        parent_branch_id=None,
        shared_prefix=0,
        token_ids=np.arange(len(array), dtype=np.int32) % len(WORDS),
        loss_mask=sampled,
        logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        policy_versions=array,
        turns=[TurnSpan("user", 0, 5), TurnSpan("assistant", 5, len(array), "stop", "e-r0", 1.0, 1.0, 0)],
        messages="[]",
        reward=1.0,
        reward_parts={"answer": 1.0},
        status="finished",
        interruptions=0,
        started_at=100.0,
        finished_at=101.5,
    )
    return replace(row, **changes)


GIVEN = [NOT_SAMPLED] * 5
