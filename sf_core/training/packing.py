"""Packing of a batch's rows into microbatches: which tokens go through the network together, and which
outputs are trained. Knows nothing of the network and the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sf_core.pictures.positions import place_tokens
from sf_core.pictures.spans import name_pictures
from storage.media import PictureSpan
from storage.tables.batches import select_training_rows
from storage.tables.schema import NOT_SAMPLED
from storage.tables.trajectories import images_of

SAMPLING = np.dtype([("temperature", "f4"), ("top_p", "f4"), ("top_k", "i8")])
"""Sampling parameters with which a token was drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory; the arrays have one element per token."""

    token_ids: npt.NDArray[np.int32]
    """Ids; a placeholder is replaced by the name of its picture, whose number is that in the batch."""
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
    pictures: tuple[PictureSpan, ...] = ()
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
    def seen(self) -> list[PictureSpan]:
        """The pictures among these tokens."""
        return [picture for picture in self.pictures if picture.start < self.length]


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """R rows of at most T tokens as a trie: a prefix that rows share, such as the prompt of a group, is held
    once and goes through the network once. N distinct tokens remain; M tokens are trained."""

    token_ids: torch.Tensor
    """[N] int64, tokens of the trie; below 0 where they show a picture."""
    depths: torch.Tensor
    """[N] position of each token in its row; [N, 3] if a row has a picture."""
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
    pictures: tuple[PictureSpan, ...] = ()
    """Each picture of the rows once."""
    shown: torch.Tensor | None = None
    """[P] index in token_ids of each token that shows a picture; None without any."""
    parts: torch.Tensor | None = None
    """[P] what each of them shows, counted through all tokens of `pictures`."""
    features: torch.Tensor | None = None
    """[P, width] what the network reads in the place of their embeddings."""

    @classmethod
    def empty(cls) -> Microbatch:
        """A token that trains nothing, for a rank that computes along with others."""
        zero, none = torch.zeros(1, dtype=torch.long), torch.empty(0)
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
        )

    def to(self, device: torch.device) -> Microbatch:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **values | {name: tensor.to(device) for name, tensor in tensors.items()})

    @property
    def padded_ids(self) -> torch.Tensor:
        """[R, T] token ids, padded on the right."""
        return self.token_ids[self.grid]


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
    pictures = images_of(batch)
    numbers = {
        sha256: number
        for number, sha256 in enumerate(dict.fromkeys(p.sha256 for own in pictures for p in own))
    }
    per_token[0] = [
        name_pictures(ids, own, numbers) if own else ids
        for ids, own in zip(per_token[0], pictures, strict=True)
    ]
    per_row = [*(batch[name].to_pylist() for name in ("group_id", "session_id")), pictures]
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


def split_groups(rows: Sequence[Row], num_parts: int, random: np.random.Generator) -> list[list[Row]]:
    """Deal whole groups at random into parts of about equal size."""
    groups = list(dict.fromkeys(row.group for row in rows))
    part_of = {groups[g]: i % num_parts for i, g in enumerate(random.permutation(len(groups)))}
    return [[row for row in rows if part_of[row.group] == part] for part in range(num_parts)]


def deal(rows: Sequence[Row], num_parts: int) -> list[list[Row]]:
    """Split rows, deterministically, into parts of about equal numbers of tokens. Rows with a common prefix
    stay together, because the prefix goes through the network once."""
    ordered = _in_token_order(rows)
    lengths = np.array([row.length for row in ordered], dtype=np.int64)
    middles = np.cumsum(lengths) - lengths / 2
    part_of = np.minimum(middles * num_parts // max(int(lengths.sum()), 1), num_parts - 1)
    return [[row for row, p in zip(ordered, part_of, strict=True) if p == part] for part in range(num_parts)]


def pack(rows: Sequence[Row], max_tokens: int) -> Iterator[Microbatch]:
    """Microbatches of at most `max_tokens` tokens, padding included; a longer row is one by itself.

    Rows are sorted by their tokens, so that rows with a common prefix are neighbours.
    """
    return map(_microbatch, _together(rows, max_tokens))


def share(rows: Sequence[Row], part: int, num_parts: int, max_tokens: int) -> list[Microbatch]:
    """The microbatches of one of the parts into which `deal` splits the rows: as many as those of any other,
    because ranks that hold a model together go through it together. Some may be empty."""
    parts = [list(_together(own, max_tokens)) for own in deal(rows, num_parts)]
    own = [_microbatch(together) for together in parts[part]]
    return own + [Microbatch.empty()] * (max(map(len, parts)) - len(own))


def _together(rows: Sequence[Row], max_tokens: int) -> Iterator[list[Row]]:
    """The rows of each microbatch."""
    ordered = _in_token_order(row for row in rows if row.length)
    together: list[Row] = []
    width = 0
    for row in ordered:
        width = max(width, row.length)
        if together and (len(together) + 1) * width > max_tokens:
            yield together
            together, width = [], row.length
        together.append(row)
    if together:
        yield together


def _microbatch(rows: Sequence[Row]) -> Microbatch:
    """Build the trie of rows that are sorted by their tokens."""
    grid = np.zeros((len(rows), max(row.length for row in rows)), dtype=np.int64)
    starts, num_tokens = [], 0
    for line, row in enumerate(rows):
        shared = _common_prefix(rows[line - 1], row) if line else 0
        grid[line, :shared] = grid[line - 1, :shared]
        grid[line, shared : row.length] = np.arange(num_tokens, num_tokens + row.length - shared)
        starts.append(shared)
        num_tokens += row.length - shared
    own = [np.arange(start, row.length) for start, row in zip(starts, rows, strict=True)]
    depths, seen = own, {}
    if any(row.seen for row in rows):
        depths = [place_tokens(row.length, row.seen)[i] for row, i in zip(rows, own, strict=True)]
        seen = _find_shown(rows, own)
    trained = [np.flatnonzero(row.loss_mask) for row in rows]

    def gather(arrays: Sequence[npt.NDArray[Any]], indices: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([a[i] for a, i in zip(arrays, indices, strict=True)]))

    return Microbatch(
        token_ids=gather([row.token_ids for row in rows], own).long(),
        depths=torch.from_numpy(np.concatenate(depths)),
        grid=torch.from_numpy(grid),
        owners=torch.from_numpy(np.concatenate([line * grid.shape[1] + i for line, i in enumerate(own)])),
        positions=gather(list(grid), [i - 1 for i in trained]),
        targets=gather([row.token_ids for row in rows], trained).long(),
        logprobs=gather([row.logprobs for row in rows], trained),
        old=gather([row.logprobs if row.old is None else row.old for row in rows], trained),
        reference=gather([_or_full(row.reference, row, np.nan) for row in rows], trained),
        advantages=gather([row.advantages for row in rows], trained),
        weights=gather([row.weights for row in rows], trained),
        correction=gather([_or_full(row.correction, row, 1.0) for row in rows], trained),
        values=gather([_or_full(row.values, row, np.nan) for row in rows], trained),
        returns=gather([_or_full(row.returns, row, np.nan) for row in rows], trained),
        row=torch.from_numpy(np.repeat(np.arange(len(rows)), [i.size for i in trained])),
        numbers=np.array([row.number for row in rows], dtype=np.int64),
        policy_versions=gather([row.policy_versions for row in rows], trained),
        sampling=np.concatenate([row.sampling[i] for row, i in zip(rows, trained, strict=True)]),
        **seen,
    )


def _find_shown(rows: Sequence[Row], own: Sequence[npt.NDArray[np.int64]]) -> dict[str, Any]:
    """The fields of a microbatch that tell what its tokens show. `own`: of each row, the tokens that no row
    before has."""
    pictures = {picture.sha256: picture for row in rows for picture in row.seen}
    ends = np.cumsum([picture.length for picture in pictures.values()])
    first = {sha256: int(end) - pictures[sha256].length for sha256, end in zip(pictures, ends, strict=True)}
    parts = []
    for row, places in zip(rows, own, strict=True):
        of_tokens = np.full(row.token_ids.size, -1)
        for picture in row.seen:
            of_tokens[picture.start :][: picture.length] = first[picture.sha256] + np.arange(picture.length)
        parts.append(of_tokens[places])
    together = torch.from_numpy(np.concatenate(parts))
    (shown,) = torch.nonzero(together >= 0, as_tuple=True)
    return {"pictures": tuple(pictures.values()), "shown": shown, "parts": together[shown]}


def _or_full(values: npt.NDArray[np.float32] | None, row: Row, default: float) -> npt.NDArray[np.float32]:
    return np.full(row.token_ids.size, default, np.float32) if values is None else values


def _in_token_order(rows: Iterable[Row]) -> list[Row]:
    # Big-endian bytes compare like the numbers they spell.
    return sorted(rows, key=lambda row: row.token_ids.astype(">i4").tobytes())


def _common_prefix(a: Row, b: Row) -> int:
    """Number of leading tokens that both rows share and the network reads."""
    length = min(a.length, b.length)
    differs = a.token_ids[:length] != b.token_ids[:length]
    return int(differs.argmax()) if differs.any() else length


def _split(batch: pa.Table, name: str, dtype: type, null: object) -> list[npt.NDArray[Any]]:
    """One array per row of a list column, which may be all null."""
    column = batch[name].combine_chunks()
    if column.null_count == len(column):
        return [np.full(n, null, dtype) for n in pc.list_value_length(batch["token_ids"]).to_pylist()]
    values = pc.fill_null(column.flatten(), null).to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _sampling(batch: pa.Table) -> list[npt.NDArray[np.void]]:
    """Sampling parameters of every row's tokens, one SAMPLING array per row, from its turns."""
    turns = batch["turns"].combine_chunks()
    spans = pa.Table.from_struct_array(turns.flatten()).append_column("row", pc.list_parent_indices(turns))
    spans = spans.filter(pc.is_valid(spans["temperature"]))
    ends = np.cumsum(pc.list_value_length(batch["token_ids"]).to_numpy())
    of_tokens = np.zeros(ends[-1] if len(ends) else 0, SAMPLING)
    first = np.concatenate([[0], ends])[spans["row"].to_numpy()] + spans["start"].to_numpy()
    lengths = spans["end"].to_numpy() - spans["start"].to_numpy()
    tokens = np.repeat(first - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
    for name in SAMPLING.names or ():
        of_tokens[name][tokens] = np.repeat(spans[name].to_numpy(), lengths)
    return np.split(of_tokens, ends[:-1]) if len(ends) else []
