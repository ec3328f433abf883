"""A microbatch: rows as a trie of tokens, and which outputs are trained. Also which rows go through the
network together. Knows nothing of the network and the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sf_core.config.train_config import DEFAULT_PASS_TOKENS, PackingRule
from sf_core.models.images.mrope import mrope_positions
from sf_core.training.packing.rows import SAMPLING, Row, common_prefix, in_token_order
from storage.media import ImageSpan

_PASSES_PER_BOUND = 32
"""A microbatch costs about as much as a 32nd of the tokens that it may hold, whatever it holds: the gradient
of every weight is added once more."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How rows are packed into microbatches."""

    max_tokens: int | None = None
    """Most tokens of a microbatch of several rows. None: DEFAULT_PASS_TOKENS, or twice the longest row."""
    rule: PackingRule = "distinct"

    def bound(self, rows: Sequence[Row]) -> int:
        """Most tokens of a microbatch of several of these rows."""
        if self.max_tokens is not None:
            return self.max_tokens
        if self.rule == "padded":
            return DEFAULT_PASS_TOKENS
        return max(DEFAULT_PASS_TOKENS, 2 * max((row.length for row in rows), default=0))


def split_groups(rows: Sequence[Row], num_parts: int, random: np.random.Generator) -> list[list[Row]]:
    """Deal whole groups at random into parts of about equal size."""
    groups = list(dict.fromkeys(row.group for row in rows))
    shuffled = random.permutation(len(groups))
    part_of = {groups[index]: position % num_parts for position, index in enumerate(shuffled)}
    return [[row for row in rows if part_of[row.group] == part] for part in range(num_parts)]


def deal(rows: Sequence[Row], num_parts: int, rule: PackingRule) -> list[list[Row]]:
    """Split rows, deterministically, into parts of about equal numbers of tokens. Rows with a common prefix
    stay together, because the prefix goes through the network once."""
    ordered = in_token_order(rows)
    lengths = _lengths(ordered)
    if rule == "distinct":
        lengths -= _prefixes(ordered)
    middles = np.cumsum(lengths) - lengths / 2
    part_of = np.minimum(middles * num_parts // max(int(lengths.sum()), 1), num_parts - 1)
    return [[row for row, p in zip(ordered, part_of, strict=True) if p == part] for part in range(num_parts)]


def pack(rows: Sequence[Row], packing: Packing) -> Iterator[Microbatch]:
    """The microbatches of these rows. A row with more tokens than the bound is one by itself."""
    bound = packing.bound(rows)
    for together in _together(rows, packing.rule, bound):
        yield make_microbatch(together, packing.rule, bound)


def share(rows: Sequence[Row], part: int, num_parts: int, packing: Packing) -> list[Microbatch]:
    """The microbatches of one of the parts into which `deal` splits the rows: as many as those of any other,
    because ranks that hold a model together go through it together. Some may be empty."""
    bound = packing.bound(rows)
    parts = [
        list(_together(rows_of_part, packing.rule, bound))
        for rows_of_part in deal(rows, num_parts, packing.rule)
    ]
    own = [make_microbatch(together, packing.rule, bound) for together in parts[part]]
    most = max(map(len, parts))
    return own + [Microbatch.empty()] * (most - len(own))


def _together(rows: Sequence[Row], rule: PackingRule, bound: int) -> Iterator[list[Row]]:
    """The rows of each microbatch. They are sorted by their tokens, so that rows with a common prefix are
    neighbours."""
    ordered = in_token_order(row for row in rows if row.length)
    find_starts = _starts_by_distinct_tokens if rule == "distinct" else _starts_by_padded_tokens
    for start, end in pairwise([*find_starts(ordered, bound), len(ordered)]):
        yield ordered[start:end]


def _starts_by_distinct_tokens(rows: Sequence[Row], bound: int) -> list[int]:
    """The first row of each microbatch, such that as few tokens as possible are computed, where a microbatch
    costs a few tokens by itself: what a first row shares with the row before it is computed once more."""
    prefixes = _prefixes(rows)
    ends = np.concatenate(([0], np.cumsum(_lengths(rows) - prefixes)))
    per_microbatch = bound // _PASSES_PER_BOUND
    # cost of all rows before this one, and of this one's prefix
    costs = np.zeros(len(rows) + 1, np.int64)
    best = np.zeros(len(rows), np.int64)
    first = 0
    for row in range(len(rows)):
        while first < row and prefixes[first] + ends[row + 1] - ends[first] > bound:
            first += 1
        best[row] = first + int(np.argmin(costs[first : row + 1] + prefixes[first : row + 1]))
        costs[row + 1] = costs[best[row]] + prefixes[best[row]] + per_microbatch
    starts: list[int] = []
    end = len(rows)
    while end:
        end = int(best[end - 1])
        starts.append(end)
    return starts[::-1]


def _starts_by_padded_tokens(rows: Sequence[Row], bound: int) -> list[int]:
    """The same, as steps were packed before there was a rule: by rows times the longest of them."""
    starts: list[int] = []
    width = 0
    for number, row in enumerate(rows):
        width = max(width, row.length)
        if not starts or (number - starts[-1] + 1) * width > bound:
            starts.append(number)
            width = row.length
    return starts


def _lengths(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    return np.array([row.length for row in rows], np.int64)


def _prefixes(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    """Number of leading tokens that each row shares with the one before it."""
    shared = [common_prefix(before, row) for before, row in pairwise(rows)]
    return np.array([0, *shared][: len(rows)], np.int64)


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
