"""Which rows go through the network together. Knows nothing of the network and the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sf_core.config.train_config import DEFAULT_PASS_TOKENS, PackingRule
from sf_core.training.packing.rows import Row, common_prefix, in_token_order
from sf_core.training.packing.trie import Microbatch, make_microbatch

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
