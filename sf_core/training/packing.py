"""From the rows of a batch to microbatches: what goes through the network together, and which of its outputs
are trained. Knows nothing of the network and the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory; the arrays have one element per token."""

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    policy_versions: npt.NDArray[np.int32]
    weight: float
    group: str

    @property
    def length(self) -> int:
        """Tokens the network has to read: nothing behind the one before the last trained token."""
        trained = np.flatnonzero(self.loss_mask)
        return int(trained[-1]) if trained.size else 0


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """B rows of at most T tokens, and the N tokens of them that are trained."""

    token_ids: torch.Tensor
    """[B, T] int64, padded on the right: under causal attention padding changes no trained token, so there
    is no attention mask."""
    positions: torch.Tensor
    """[N] index into the flattened [B * T] of the outputs that predict the trained tokens."""
    targets: torch.Tensor
    """[N] the trained tokens."""
    logprobs: torch.Tensor
    """[N] recorded when they were sampled."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """[N] weight of each token's row."""
    policy_versions: torch.Tensor


def read_rows(batch: pa.Table) -> list[Row]:
    """The rows of a batch that train.

    Raises ValueError if a row trains its first token, which nothing predicts."""
    batch = batch.filter(pc.equal(batch["decision"], "train"))
    per_token = [
        _split(batch, "token_ids", np.int32, 0),
        _split(batch, "loss_mask", np.bool_, False),
        _split(batch, "logprobs", np.float32, 0.0),
        _split(batch, "advantages", np.float32, 0.0),
        _split(batch, "policy_versions", np.int32, 0),
    ]
    weights, groups = batch["weight"].to_pylist(), batch["group_id"].to_pylist()
    rows = [Row(*arrays) for arrays in zip(*per_token, weights, groups, strict=True)]
    if any(row.loss_mask[:1].any() for row in rows):
        raise ValueError("a trajectory's first token is marked as sampled; expected a prompt before it")
    return rows


def split_groups(rows: Sequence[Row], num_parts: int, random: np.random.Generator) -> list[list[Row]]:
    """Deal whole groups at random into parts of about equal size."""
    groups = list(dict.fromkeys(row.group for row in rows))
    part_of = {groups[g]: i % num_parts for i, g in enumerate(random.permutation(len(groups)))}
    return [[row for row in rows if part_of[row.group] == part] for part in range(num_parts)]


def pack(rows: Sequence[Row], max_tokens: int) -> Iterator[Microbatch]:
    """Microbatches of at most max_tokens tokens, padding included; a longer row comes alone."""
    ordered = sorted((row for row in rows if row.length), key=lambda row: row.length)
    together: list[Row] = []
    for row in ordered:
        if together and (len(together) + 1) * row.length > max_tokens:
            yield _microbatch(together)
            together = []
        together.append(row)
    if together:
        yield _microbatch(together)


def _microbatch(rows: Sequence[Row]) -> Microbatch:
    width = max(row.length for row in rows)
    token_ids = np.zeros((len(rows), width), dtype=np.int64)
    for line, row in zip(token_ids, rows, strict=True):
        line[: row.length] = row.token_ids[: row.length]
    trained = [np.flatnonzero(row.loss_mask) for row in rows]

    def gather(arrays: list[npt.NDArray[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([a[i] for a, i in zip(arrays, trained, strict=True)]))

    return Microbatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(np.concatenate([n * width + i - 1 for n, i in enumerate(trained)])),
        targets=gather([row.token_ids for row in rows]).long(),
        logprobs=gather([row.logprobs for row in rows]),
        advantages=gather([row.advantages for row in rows]),
        weights=torch.from_numpy(np.repeat([row.weight for row in rows], [i.size for i in trained])).float(),
        policy_versions=gather([row.policy_versions for row in rows]),
    )


def _split(batch: pa.Table, name: str, dtype: type, null: object) -> list[npt.NDArray[np.generic]]:
    """One array per row of a list column."""
    column = batch[name].combine_chunks()
    values = pc.fill_null(column.flatten(), null).to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
