"""Small batches as the filter would have written them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from storage.tables.schema import PART, TURN


def make_batch(
    rows: list[tuple[list[int], list[bool]]],
    *,
    logprob: float = -2.0,
    version: int = 0,
    seed: int = 0,
    group_size: int = 2,
    equal: int = 0,
    sampling: tuple[float, float, int] = (1.0, 1.0, 0),
    branches: int = 1,
) -> pa.Table:
    """Batch of rows (token ids, loss mask), each one turn with `sampling` = (temperature, top-p, top-k);
    neighbours form sessions of `branches` branches, and groups; advantages are drawn from the seed, but zero
    in the first `equal` rows."""
    random = np.random.default_rng(seed)
    advantages = random.normal(size=len(rows))
    advantages[:equal] = 0.0
    return pa.table(
        {
            "token_ids": pa.array([ids for ids, _ in rows], pa.list_(pa.int32())),
            "loss_mask": pa.array([mask for _, mask in rows], pa.list_(pa.bool_())),
            "logprobs": pa.array(
                [[logprob if sampled else None for sampled in mask] for _, mask in rows],
                pa.list_(pa.float32()),
            ),
            "policy_versions": pa.array(
                [[version if sampled else None for sampled in mask] for _, mask in rows],
                pa.list_(pa.int32()),
            ),
            "advantages": pa.array(
                [[a] * len(ids) for a, (ids, _) in zip(advantages, rows, strict=True)],
                pa.list_(pa.float32()),
            ),
            "turns": pa.array([[_turn(len(ids), *sampling)] for ids, _ in rows], pa.list_(TURN)),
            "weights": pa.array([[1.0] * len(ids) for ids, _ in rows], pa.list_(pa.float32())),
            "status": ["finished"] * len(rows),
            "reward": pa.array(advantages),
            "reward_parts": pa.array([[]] * len(rows), pa.list_(PART)),
            "environment": ["test"] * len(rows),
            "branch_id": [str(i) for i in range(len(rows))],
            "parent_branch_id": pa.nulls(len(rows), pa.string()),
            "shared_prefix": pa.array([0] * len(rows), pa.int32()),
            "session_id": [f"s{i // branches}" for i in range(len(rows))],
            "group_id": [f"g{i // group_size}" for i in range(len(rows))],
            "decision": ["train"] * len(rows),
        }
    )


def _turn(end: int, temperature: float, top_p: float, top_k: int) -> dict[str, object]:
    return {"start": 0, "end": end, "temperature": temperature, "top_p": top_p, "top_k": top_k}


def grouped_rows(
    num_groups: int, group_size: int, *, prompt: int = 6, sampled: int = 8, vocabulary: int = 64
) -> list[tuple[list[int], list[bool]]]:
    """Rows that share their prompt within a group and are of different lengths."""
    random = np.random.default_rng(1)
    rows = []
    for _ in range(num_groups):
        start = random.integers(vocabulary, size=prompt).tolist()
        for _ in range(group_size):
            length = int(random.integers(1, sampled + 1))
            ids = start + random.integers(vocabulary, size=length).tolist()
            rows.append((ids, [False] * prompt + [True] * length))
    return rows
