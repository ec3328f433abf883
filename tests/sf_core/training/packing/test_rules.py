"""Which rows go through the network together: little is computed twice, and the bound is kept."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.training.packing import trie
from sf_core.training.packing.rows import Row, read_rows
from sf_core.training.packing.trie import Packing, pack, share, split_groups
from tests.bench.properties import examples
from tests.bench.training import batches
from tests.sf_core.training.packing import packed_batches

Rows = list[tuple[list[int], list[bool]]]
Rule = Literal["distinct", "padded"]


def groups_of(
    prompt: int, sampled: int, num_groups: int = 2, size: int = 8, ids: tuple[int, int] = (0, 500)
) -> list[Row]:
    """Groups of answers of half to all of these tokens."""
    random = np.random.default_rng(0)
    found: Rows = []
    for _ in range(num_groups):
        shown = random.integers(*ids, size=prompt).tolist()
        for _ in range(size):
            length = int(random.integers(sampled // 2, sampled + 1))
            answer = random.integers(500, size=length).tolist()
            found.append((shown + answer, [False] * prompt + [True] * length))
    return read_rows(batches.make_batch(found, group_size=size))


def computed(rows: list[Row], packing: Packing) -> int:
    return sum(len(microbatch.token_ids) for microbatch in pack(rows, packing))


def computed_over_distinct(rows: list[Row], packing: Packing) -> float:
    return computed(rows, packing) / computed(rows, Packing(1 << 40))


@pytest.mark.parametrize(("sampled", "most"), [(512, 1.15), (1024, 1.35)])
@pytest.mark.parametrize("prompt", [128, 512, 1024, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384])
def test_of_long_prompts_little_is_computed_twice(prompt: int, sampled: int, most: float) -> None:
    assert computed_over_distinct(groups_of(prompt, sampled), Packing()) <= most


@pytest.mark.parametrize(
    ("prompt", "sampled", "before"), [(2048, 2048, 1.4), (4096, 1024, 3.7), (8192, 1024, 4.9)]
)
def test_by_padded_tokens_long_prompts_are_computed_for_each_answer(
    prompt: int, sampled: int, before: float
) -> None:
    assert computed_over_distinct(groups_of(prompt, sampled), Packing(8192, "padded")) > before


@settings(max_examples=examples(300))
@given(packed_batches.batches, st.integers(1, 60))
def test_a_microbatch_keeps_to_its_bound_unless_one_row_exceeds_it(rows: Rows, max_tokens: int) -> None:
    for microbatch in pack(read_rows(batches.make_batch(rows)), Packing(max_tokens)):
        assert len(microbatch.token_ids) <= max_tokens or len(microbatch.grid) == 1
    for microbatch in pack(read_rows(batches.make_batch(rows)), Packing(max_tokens, "padded")):
        assert microbatch.grid.numel() <= max_tokens or len(microbatch.grid) == 1


@settings(max_examples=examples(300))
@given(packed_batches.batches.filter(lambda rows: len(rows) <= 8), st.integers(1, 60), st.integers(1, 64))
def test_no_other_cuts_compute_less(rows: Rows, max_tokens: int, passes: int) -> None:
    own = read_rows(batches.make_batch(rows))

    def cost(microbatches: list[int]) -> int:
        return sum(tokens + max_tokens // passes for tokens in microbatches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie, "_PASSES_PER_BOUND", passes)
        found = [len(microbatch.token_ids) for microbatch in pack(own, Packing(max_tokens))]
    ordered = [row for row in trie.in_token_order(own) if row.length]
    least = 1 << 40 if ordered else 0
    for cuts in product([False, True], repeat=max(0, len(ordered) - 1)):
        starts = [0, *(at + 1 for at, is_cut in enumerate(cuts) if is_cut)]
        parts = [ordered[start:end] for start, end in pairwise([*starts, len(ordered)])]
        sizes = [computed(part, Packing(1 << 40)) for part in parts if part]
        if all(size <= max_tokens or len(part) == 1 for size, part in zip(sizes, parts, strict=False)):
            least = min(least, cost(sizes))
    assert cost(found) == least


def test_a_bound_that_is_not_given_follows_the_longest_row() -> None:
    assert Packing().bound(groups_of(100, 20)) == 8192
    long = groups_of(10_000, 2)
    assert Packing().bound(long) == 2 * max(row.length for row in long)
    assert Packing(64).bound(long) == 64
    assert Packing(None, "padded").bound(long) == 8192


@given(st.integers(1, 6), st.integers(1, 4))
def test_groups_stay_whole_when_split(num_groups: int, num_parts: int) -> None:
    rows = read_rows(batches.make_batch(batches.grouped_rows(num_groups, 2)))
    parts = split_groups(rows, num_parts, np.random.default_rng(0))
    assert sum(len(part) for part in parts) == len(rows)
    groups = [{row.group for row in part} for part in parts]
    assert sum(len(part) for part in groups) == len(set().union(*groups)) == num_groups


@given(packed_batches.batches, st.integers(1, 60), st.integers(1, 4), st.sampled_from(["distinct", "padded"]))
def test_shares_have_equally_many_microbatches_and_each_token_is_in_one(
    rows: Rows, max_tokens: int, num_parts: int, rule: Rule
) -> None:
    own = read_rows(packed_batches.told_apart(rows))
    packing = Packing(max_tokens, rule)
    shares = [share(own, part, num_parts, packing) for part in range(num_parts)]
    assert len({len(microbatches) for microbatches in shares}) == 1
    shared = [x for microbatches in shares for m in microbatches for x in m.policy_versions.tolist()]
    packed = [x for m in pack(own, packing) for x in m.policy_versions.tolist()]
    assert sorted(shared) == sorted(packed)


def test_shares_have_about_as_many_distinct_tokens() -> None:
    # all rows that share much are before those that share little
    rows = [
        *groups_of(2000, 50, num_groups=8, ids=(0, 200)),
        *groups_of(10, 400, num_groups=8, ids=(200, 500)),
    ]
    sizes = [sum(len(m.token_ids) for m in share(rows, part, 2, Packing(1 << 20))) for part in range(2)]
    assert max(sizes) < 1.25 * min(sizes)
