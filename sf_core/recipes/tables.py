"""Samples from the tables in which trajectories and batches are stored. Settings load without this module."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.recipes.samples import Samples, Turns
from sf_core.types import FinishReason
from storage.tables.parquet import numpy_rows
from storage.tables.schema import NOT_SAMPLED


def samples_of(rows: pa.Table, iteration: int) -> Samples:
    """The samples of rows of storage.tables.trajectories, of which none lacks a reward."""
    sessions, first = _encode_labels(rows["session_id"])
    truncated = np.bincount(sessions, weights=_is_cut_off(rows["turns"])) > 0
    return Samples(
        rewards=rows["reward"].to_numpy()[first],
        groups=_encode_labels(rows["group_id"].take(pa.array(first)))[0],
        truncated=truncated,
        statuses=rows["status"].take(pa.array(first)).to_pylist(),
        sessions=sessions,
        environments=rows["environment"].take(pa.array(first)).to_pylist(),
        masks=numpy_rows(rows["loss_mask"]),
        versions=numpy_rows(rows["policy_versions"], fill=NOT_SAMPLED),
        logprobs=numpy_rows(rows["logprobs"], fill=0.0),
        iteration=iteration,
        parents=_parents(rows),
        shared=rows["shared_prefix"].to_numpy().astype(np.int64),
        turns=_turns(rows["turns"]),
    )


def _parents(rows: pa.Table) -> npt.NDArray[np.int64]:
    row_of_branch = {branch: row for row, branch in enumerate(_branch_keys(rows, "branch_id"))}
    return np.array(
        [row_of_branch.get(parent, -1) for parent in _branch_keys(rows, "parent_branch_id")], np.int64
    )


def _branch_keys(rows: pa.Table, column: str) -> list[tuple[str, str | None]]:
    """Branches are unique in their session."""
    return list(zip(rows["session_id"].to_pylist(), rows[column].to_pylist(), strict=True))


def _turns(turns: pa.ChunkedArray) -> Turns:
    lists = turns.combine_chunks()
    flat = lists.flatten()
    # what only sampled turns have
    sampled = pc.is_valid(pc.struct_field(flat, "engine"))

    def column(name: str) -> npt.NDArray[np.float64]:
        values_or_null = pc.struct_field(flat, name).filter(sampled)
        values: npt.NDArray[np.float64] = values_or_null.fill_null(0).to_numpy(zero_copy_only=False)
        return values

    return Turns(
        rows=pc.list_parent_indices(lists).filter(sampled).to_numpy().astype(np.int64),
        starts=column("start").astype(np.int64),
        ends=column("end").astype(np.int64),
        rewards=column("reward"),
    )


def _encode_labels(labels: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Number of each label in the order in which they come, and the place of the first of each."""
    codes = labels.combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    return codes, np.unique(codes, return_index=True)[1]


def _is_cut_off(turns: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Whether the last turn that was sampled in each row ended at a limit of tokens."""
    lists = turns.combine_chunks()
    reasons = pc.struct_field(lists.flatten(), "finish_reason")
    sampled = np.flatnonzero(pc.is_valid(reasons).to_numpy(zero_copy_only=False))
    last = np.full(len(lists), -1)
    # of several assignments to one place the last one stays
    last[pc.list_parent_indices(lists).to_numpy()[sampled]] = sampled
    is_cut = pc.fill_null(pc.equal(reasons, FinishReason.LENGTH), False).to_numpy(zero_copy_only=False)
    return np.append(is_cut, False)[last]
