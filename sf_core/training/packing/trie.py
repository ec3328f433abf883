"""A microbatch: rows as a trie of tokens, and which outputs are trained. Knows nothing of the network and the
loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sf_core.config.train_config import PackingRule
from sf_core.models.images.mrope import mrope_positions
from sf_core.training.packing.rows import SAMPLING, Row, common_prefix
from storage.media import ImageSpan


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """R rows of at most T tokens as a trie: a prefix that rows share, such as the prompt of a group, is held
    once and goes through the network once. N distinct tokens remain; M tokens are trained."""

    token_ids: torch.Tensor
    """[N] int64, tokens of the trie; below 0 where they show an image."""
    depths: torch.Tensor
    """[N] position of each token in its row; [N, 3] if a row has an image."""
    grid: torch.Tensor
    """[R, T] index of each row's tokens in token_ids; arbitrary after a row's end, since causal attention
    does not look ahead."""
    owners: torch.Tensor
    """[N] index in the flattened grid of one place where the token stands."""
    positions: torch.Tensor
    """[M] index in token_ids of the token before each trained one, whose output predicts it."""
    targets: torch.Tensor
    """[M] the trained tokens."""
    logprobs: torch.Tensor
    """[M] log-probs recorded at sampling."""
    old: torch.Tensor
    """[M] log-probs under the policy that the ratio is to."""
    reference: torch.Tensor
    """[M] log-probs under the reference policy; NaN without one."""
    advantages: torch.Tensor
    weights: torch.Tensor
    correction: torch.Tensor
    """[M] factor of each token's part of the policy's loss."""
    values: torch.Tensor
    """[M] values at the start of the step; NaN without a critic."""
    returns: torch.Tensor
    """[M] what the critic is taught to expect; NaN without one."""
    row: torch.Tensor
    """[M] index in `numbers` of each token's row."""
    numbers: npt.NDArray[np.int64]
    """[R] place of each row in the batch; stays on the host."""
    policy_versions: torch.Tensor
    sampling: npt.NDArray[np.void]
    """[M] of dtype SAMPLING; stays on the host."""
    own: npt.NDArray[np.int64]
    """[R, 2] places [start, end) of each row's tokens that no row before it has; stays on the host."""
    rule: PackingRule
    """How the rows were chosen."""
    bound: int
    """Most tokens of a microbatch of several rows."""
    images: tuple[ImageSpan, ...] = ()
    """Each image of the rows once."""
    image_positions: torch.Tensor | None = None
    """[P] index in token_ids of each token that shows an image; None without any."""
    feature_indices: torch.Tensor | None = None
    """[P] what each of them shows, counted through all tokens of `images`."""
    features: torch.Tensor | None = None
    """[P, width] what the network reads in the place of their embeddings."""

    @classmethod
    def empty(cls) -> Microbatch:
        """A token that trains nothing, for a rank that computes along with others."""
        zero = torch.zeros(1, dtype=torch.long)
        none = torch.empty(0)
        no_ids = none.long()
        return cls(
            token_ids=zero,
            depths=zero,
            grid=zero.unsqueeze(0),
            owners=zero,
            positions=no_ids,
            targets=no_ids,
            logprobs=none,
            old=none,
            reference=none,
            advantages=none,
            weights=none,
            correction=none,
            values=none,
            returns=none,
            row=no_ids,
            numbers=np.zeros(0, np.int64),
            policy_versions=no_ids,
            sampling=np.zeros(0, SAMPLING),
            own=np.array([[0, 1]]),
            rule="distinct",
            bound=1,
        )

    def to(self, device: torch.device) -> Microbatch:
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                moved[field.name] = value.to(device)
        return replace(self, **moved)

    @property
    def padded_ids(self) -> torch.Tensor:
        """[R, T] token ids, padded on the right."""
        return self.token_ids[self.grid]


def make_microbatch(rows: Sequence[Row], rule: PackingRule, bound: int) -> Microbatch:
    """The trie of rows that are sorted by their tokens."""
    grid, starts = _make_grid(rows)
    width = grid.shape[1]
    own = [np.arange(start, row.length) for start, row in zip(starts, rows, strict=True)]
    owners = [line * width + indices for line, indices in enumerate(own)]
    depths = own
    seen = {}
    if any(row.network_images for row in rows):
        positions = [mrope_positions(row.length, row.network_images) for row in rows]
        depths = [of_row[indices] for of_row, indices in zip(positions, own, strict=True)]
        seen = _locate_images(rows, own)
    trained = [np.flatnonzero(row.loss_mask) for row in rows]

    def gather(arrays: Sequence[npt.NDArray[Any]], indices: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
        """The elements at the indices of each row, one row behind the other."""
        of_rows = [array[index] for array, index in zip(arrays, indices, strict=True)]
        return torch.from_numpy(np.concatenate(of_rows))

    return Microbatch(
        token_ids=gather([row.token_ids for row in rows], own).long(),
        depths=torch.from_numpy(np.concatenate(depths)),
        grid=torch.from_numpy(grid),
        owners=torch.from_numpy(np.concatenate(owners)),
        positions=gather(list(grid), [indices - 1 for indices in trained]),
        targets=gather([row.token_ids for row in rows], trained).long(),
        logprobs=gather([row.logprobs for row in rows], trained),
        old=gather([row.logprobs if row.old is None else row.old for row in rows], trained),
        reference=gather([_or_full(row.reference, row, np.nan) for row in rows], trained),
        advantages=gather([row.advantages for row in rows], trained),
        weights=gather([row.weights for row in rows], trained),
        correction=gather([_or_full(row.correction, row, 1.0) for row in rows], trained),
        values=gather([_or_full(row.values, row, np.nan) for row in rows], trained),
        returns=gather([_or_full(row.returns, row, np.nan) for row in rows], trained),
        row=torch.from_numpy(np.repeat(np.arange(len(rows)), [indices.size for indices in trained])),
        numbers=np.array([row.number for row in rows], dtype=np.int64),
        policy_versions=gather([row.policy_versions for row in rows], trained),
        sampling=np.concatenate([row.sampling[indices] for row, indices in zip(rows, trained, strict=True)]),
        own=np.array([[start, row.length] for start, row in zip(starts, rows, strict=True)], np.int64),
        rule=rule,
        bound=bound,
        **seen,
    )


def _make_grid(rows: Sequence[Row]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """The grid of a microbatch, and how many tokens each row has in common with the row before it."""
    grid = np.zeros((len(rows), max(row.length for row in rows)), dtype=np.int64)
    starts = []
    num_tokens = 0
    for line, row in enumerate(rows):
        shared = common_prefix(rows[line - 1], row) if line else 0
        num_own = row.length - shared
        grid[line, :shared] = grid[line - 1, :shared]
        grid[line, shared : row.length] = np.arange(num_tokens, num_tokens + num_own)
        starts.append(shared)
        num_tokens += num_own
    return grid, starts


def _locate_images(rows: Sequence[Row], own: Sequence[npt.NDArray[np.int64]]) -> dict[str, Any]:
    """The fields of a microbatch that tell what its tokens show. `own`: of each row, the tokens that no row
    before has."""
    images: dict[str, ImageSpan] = {}
    for row in rows:
        images.update((image.sha256, image) for image in row.network_images)
    first_parts: dict[str, int] = {}
    num_parts = 0
    for sha256, image in images.items():
        first_parts[sha256] = num_parts
        num_parts += image.length
    own_parts = []
    for row, indices in zip(rows, own, strict=True):
        part_of_token = np.full(row.token_ids.size, -1)
        for image in row.network_images:
            span = slice(image.start, image.start + image.length)
            part_of_token[span] = first_parts[image.sha256] + np.arange(image.length)
        own_parts.append(part_of_token[indices])
    feature_indices = torch.from_numpy(np.concatenate(own_parts))
    (image_positions,) = torch.nonzero(feature_indices >= 0, as_tuple=True)
    return {
        "images": tuple(images.values()),
        "image_positions": image_positions,
        "feature_indices": feature_indices[image_positions],
    }


def _or_full(values: npt.NDArray[np.float32] | None, row: Row, default: float) -> npt.NDArray[np.float32]:
    return np.full(row.token_ids.size, default, np.float32) if values is None else values
