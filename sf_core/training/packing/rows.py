"""The rows of a batch that train, as arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.models.images.placeholders import insert_image_ids
from storage.media import ImageSpan
from storage.tables.batches import select_training_rows
from storage.tables.schema import NOT_SAMPLED
from storage.tables.trajectories import images_of

SAMPLING = np.dtype([("temperature", "f4"), ("top_p", "f4"), ("top_k", "i8")])
"""Sampling parameters with which a token was drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory; the arrays have one element per token."""

    token_ids: npt.NDArray[np.int32]
    """Ids; a placeholder is replaced by the name of its image, whose number is that in the batch."""
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    policy_versions: npt.NDArray[np.int32]
    sampling: npt.NDArray[np.void]
    """Elements of dtype SAMPLING; zeros where no turn was sampled."""
    weights: npt.NDArray[np.float32]
    """Weight of each token in the loss."""
    group: str
    session: str
    images: tuple[ImageSpan, ...] = ()
    """What the names among the tokens show, in order."""
    number: int = 0
    """Place in the batch."""
    old: npt.NDArray[np.float32] | None = None
    """Log-probs under the policy that the ratio is to; None: those recorded at sampling."""
    reference: npt.NDArray[np.float32] | None = None
    """Log-probs under the reference policy, if there is one."""
    correction: npt.NDArray[np.float32] | None = None
    """Factor of each token's part of the policy's loss; None: 1."""
    values: npt.NDArray[np.float32] | None = None
    """Values at the start of the step, if there is a critic."""
    returns: npt.NDArray[np.float32] | None = None
    """What the critic is taught to expect, if there is one."""

    @property
    def length(self) -> int:
        """Number of tokens that the network must read: up to the one before the last trained token."""
        trained = np.flatnonzero(self.loss_mask)
        return int(trained[-1]) if trained.size else 0

    @property
    def network_images(self) -> list[ImageSpan]:
        """The images among these tokens."""
        return [image for image in self.images if image.start < self.length]


def read_rows(batch: pa.Table) -> list[Row]:
    """The rows of a batch that train.

    Raises ValueError if a row trains its first token, which nothing predicts, or a token without a log-prob,
    a policy version or sampling parameters."""
    batch = select_training_rows(batch)
    per_token = [
        _split(batch, "token_ids", np.int32, 0),
        _split(batch, "loss_mask", np.bool_, False),
        _split(batch, "logprobs", np.float32, np.nan),
        _split(batch, "advantages", np.float32, 0.0),
        _split(batch, "policy_versions", np.int32, NOT_SAMPLED),
        _sampling(batch),
        # all null where the train step makes them
        _split(batch, "weights", np.float32, 1.0),
    ]
    images = images_of(batch)
    distinct = dict.fromkeys(image.sha256 for own in images for image in own)
    numbers = {sha256: number for number, sha256 in enumerate(distinct)}
    per_token[0] = [
        insert_image_ids(ids, own, numbers) if own else ids
        for ids, own in zip(per_token[0], images, strict=True)
    ]
    per_row = [*(batch[name].to_pylist() for name in ("group_id", "session_id")), images]
    rows = [Row(*values) for values in zip(*per_token, *per_row, range(len(batch)), strict=True)]
    if any(row.loss_mask[:1].any() for row in rows):
        raise ValueError("a trajectory's first token is marked as sampled; expected a prompt before it")
    if any((row.sampling["top_p"][row.loss_mask] == 0).any() for row in rows):
        raise ValueError(
            "a trajectory trains a token that is in no sampled turn; expected `turns` to say how the "
            "token was sampled"
        )
    if not all(np.isfinite(row.logprobs[row.loss_mask]).all() for row in rows):
        raise ValueError("a trajectory trains a token without a log-prob")
    if any((row.policy_versions[row.loss_mask] == NOT_SAMPLED).any() for row in rows):
        raise ValueError("a trajectory trains a token without a policy version")
    return rows


def sampled_by_one_of(rows: Iterable[Row], versions: Collection[int]) -> tuple[int, list[Row]]:
    """The newest of these policy versions that sampled all trained tokens of a row, and the rows of which it
    did; -1 and none if there is no such version."""
    of_versions: dict[int, list[Row]] = {-1: []}
    for row in rows:
        sampled_by = np.unique(row.policy_versions[row.loss_mask])
        if sampled_by.size == 1 and int(sampled_by[0]) in versions:
            of_versions.setdefault(int(sampled_by[0]), []).append(row)
    newest = max(of_versions)
    return newest, of_versions[newest]


def in_token_order(rows: Iterable[Row]) -> list[Row]:
    # Big-endian bytes compare like the numbers they spell.
    return sorted(rows, key=lambda row: row.token_ids.astype(">i4").tobytes())


def common_prefix(a: Row, b: Row) -> int:
    """Number of leading tokens that both rows share and the network reads."""
    length = min(a.length, b.length)
    differs = a.token_ids[:length] != b.token_ids[:length]
    return int(differs.argmax()) if differs.any() else length


def _split(batch: pa.Table, name: str, dtype: type, null: object) -> list[npt.NDArray[Any]]:
    """One array per row of a list column, which may be all null."""
    column = batch[name].combine_chunks()
    if column.null_count == len(column):
        lengths = pc.list_value_length(batch["token_ids"]).to_pylist()
        return [np.full(length, null, dtype) for length in lengths]
    values = pc.fill_null(column.flatten(), null).to_numpy(zero_copy_only=False)
    ends = np.cumsum(pc.list_value_length(column).to_numpy(zero_copy_only=False))
    return np.split(values.astype(dtype, copy=False), ends[:-1])


def _sampling(batch: pa.Table) -> list[npt.NDArray[np.void]]:
    """Sampling parameters of every row's tokens, one SAMPLING array per row, from its turns."""
    turns = batch["turns"].combine_chunks()
    spans = pa.Table.from_struct_array(turns.flatten()).append_column("row", pc.list_parent_indices(turns))
    spans = spans.filter(pc.is_valid(spans["temperature"]))
    row_ends = np.cumsum(pc.list_value_length(batch["token_ids"]).to_numpy())
    row_starts = np.concatenate([[0], row_ends])
    span_starts = row_starts[spans["row"].to_numpy()] + spans["start"].to_numpy()
    lengths = spans["end"].to_numpy() - spans["start"].to_numpy()
    # the tokens of all spans, of which each counts up from its start
    in_earlier_spans = np.cumsum(lengths) - lengths
    tokens = np.repeat(span_starts - in_earlier_spans, lengths) + np.arange(lengths.sum())
    sampling = np.zeros(row_starts[-1], SAMPLING)
    for name in SAMPLING.names or ():
        sampling[name][tokens] = np.repeat(spans[name].to_numpy(), lengths)
    return np.split(sampling, row_ends[:-1]) if len(row_ends) else []
