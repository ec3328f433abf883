import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.training.packing import pack, read_rows, share, split_groups
from tests.bench.training.batches import grouped_rows, make_batch

# Few different tokens, so that rows often start alike.
row = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=12).map(
    lambda tokens: ([t for t, _ in tokens], [False] + [sampled for _, sampled in tokens[1:]])
)
batches = st.lists(row, min_size=1, max_size=12)


def told_apart(rows: list[tuple[list[int], list[bool]]]) -> pa.Table:
    """A batch in which all tokens have different values."""
    batch = make_batch(rows)
    numbers = iter(range(10_000))
    of_tokens = [[next(numbers) for _ in ids] for ids, _ in rows]
    columns = {
        "logprobs": [[-0.25 * number for number in row] for row in of_tokens],
        "advantages": [[0.5 * number + 1 for number in row] for row in of_tokens],
        "policy_versions": of_tokens,
        "weights": [[0.125 * number + 1 for number in row] for row in of_tokens],
    }
    for name, values in columns.items():
        at = batch.schema.get_field_index(name)
        batch = batch.set_column(at, name, pa.array(values, batch.schema.field(name).type))
    return batch


@given(batches, st.integers(1, 60))
def test_every_trained_token_is_packed_once_with_what_belongs_to_it(
    rows: list[tuple[list[int], list[bool]]], max_tokens: int
) -> None:
    batch = told_apart(rows)
    packed = [
        values
        for m in pack(read_rows(batch), max_tokens)
        for values in zip(
            *(t.tolist() for t in (m.targets, m.logprobs, m.advantages, m.policy_versions, m.weights)),
            strict=True,
        )
    ]
    per_token = ("token_ids", "logprobs", "advantages", "policy_versions", "weights")
    expected = [
        tuple(values)
        for (_, mask), *columns in zip(rows, *(batch[name].to_pylist() for name in per_token), strict=True)
        for sampled, *values in zip(mask, *columns, strict=True)
        if sampled
    ]
    assert sorted(packed) == sorted(expected)


@given(batches, st.integers(1, 60))
def test_tokens_of_a_microbatch_say_whose_they_are(
    rows: list[tuple[list[int], list[bool]]], max_tokens: int
) -> None:
    found = {}
    for m in pack(read_rows(told_apart(rows)), max_tokens):
        for index, number in enumerate(m.numbers.tolist()):
            found[number] = m.targets[m.row == index].tolist()
    expected = {
        number: [token for token, sampled in zip(ids, mask, strict=True) if sampled]
        for number, (ids, mask) in enumerate(rows)
        if any(mask)
    }
    assert found == expected


def test_without_scores_the_ratio_is_to_the_recorded_log_probs() -> None:
    batch = told_apart([([1, 2, 3], [False, True, True])])
    row = read_rows(batch)[0]
    (plain,) = pack([row], 100)
    assert plain.old.tolist() == plain.logprobs.tolist() and plain.correction.tolist() == [1.0, 1.0]
    assert plain.reference.isnan().all()
    scored = replace(row, old=row.logprobs - 1, reference=row.logprobs - 2, correction=row.weights)
    (m,) = pack([scored], 100)
    assert (m.logprobs - m.old).tolist() == [1.0, 1.0] and (m.logprobs - m.reference).tolist() == [2.0, 2.0]
    assert m.correction.tolist() == m.weights.tolist()


@pytest.mark.parametrize("column", ["weights", "advantages"])
def test_a_batch_without_weights_counts_each_token_and_one_without_advantages_teaches_nothing(
    column: str,
) -> None:
    batch = make_batch([([1, 2], [False, True]), ([3, 4, 5], [False, True, True])])
    nothing = pa.nulls(2, batch.schema.field(column).type)
    rows = read_rows(batch.set_column(batch.schema.get_field_index(column), column, nothing))
    expected = 1.0 if column == "weights" else 0.0
    assert [getattr(row, column).tolist() for row in rows] == [[expected] * 2, [expected] * 3]


@given(batches, st.integers(1, 60))
def test_a_trained_token_is_predicted_from_all_the_tokens_before_it(
    rows: list[tuple[list[int], list[bool]]], max_tokens: int
) -> None:
    contexts = sorted((ids[:i], ids[i]) for ids, mask in rows for i, sampled in enumerate(mask) if sampled)
    packed = []
    for microbatch in pack(read_rows(make_batch(rows)), max_tokens):
        width = microbatch.grid.shape[1]
        for position, target in zip(microbatch.positions.tolist(), microbatch.targets.tolist(), strict=True):
            line, column = divmod(int(microbatch.owners[position]), width)
            assert microbatch.depths[position] == column
            packed.append((microbatch.padded_ids[line, : column + 1].tolist(), target))
    assert sorted(packed) == contexts


@given(batches, st.integers(1, 60))
def test_a_microbatch_keeps_to_its_budget_unless_one_row_exceeds_it(
    rows: list[tuple[list[int], list[bool]]], max_tokens: int
) -> None:
    for microbatch in pack(read_rows(make_batch(rows)), max_tokens):
        assert microbatch.grid.numel() <= max_tokens or len(microbatch.grid) == 1


def test_a_shared_prompt_is_there_once() -> None:
    rows = [([1, 2, 3, last], [False, False, True, True]) for last in (4, 5, 6)]
    (microbatch,) = pack(read_rows(make_batch(rows)), max_tokens=100)
    assert microbatch.token_ids.tolist() == [1, 2, 3]
    assert microbatch.targets.tolist() == [3, 4, 3, 5, 3, 6]


def test_rows_the_filter_rejected_are_left_out() -> None:
    batch = make_batch([([1, 2], [False, True]), ([3, 4], [False, True])])
    index = batch.schema.get_field_index("decision")
    rows = read_rows(batch.set_column(index, "decision", [["train", "zero_variance"]]))
    assert [row.token_ids.tolist() for row in rows] == [[1, 2]]


def test_a_sampled_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        read_rows(make_batch([([1, 2], [True, True])]))


def test_every_trained_token_has_the_sampling_parameters_of_its_turn() -> None:
    batch = make_batch([([1, 2, 3, 4, 5], [False, True, False, True, True]), ([1, 2], [False, True])])
    prompt, first, second = (
        {"start": start, "end": end, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        for start, end, temperature, top_p, top_k in [
            (2, 3, None, None, None),
            (1, 2, 0.5, 0.25, 7),
            (3, 5, 2.0, 1.0, 0),
        ]
    )
    turns = pa.array([[first, prompt, second], [first]], batch.schema.field("turns").type)
    rows = read_rows(batch.set_column(batch.schema.get_field_index("turns"), "turns", turns))
    (microbatch,) = pack(rows, max_tokens=100)
    assert microbatch.targets.tolist() == [2, 2, 4, 5]
    assert microbatch.sampling.tolist() == [(0.5, 0.25, 7), (0.5, 0.25, 7), (2.0, 1.0, 0), (2.0, 1.0, 0)]


@pytest.mark.parametrize(
    ("column", "value", "lacks"),
    [
        ("logprobs", None, "log-prob"),
        ("logprobs", math.nan, "log-prob"),
        ("policy_versions", None, "policy version"),
    ],
)
def test_a_trained_token_of_which_it_is_not_known_how_it_was_sampled_is_refused(
    column: str, value: float | None, lacks: str
) -> None:
    batch = make_batch([([1, 2], [False, True])])
    index, kind = batch.schema.get_field_index(column), batch.schema.field(column).type
    with pytest.raises(ValueError, match=f"trains a token without a {lacks}"):
        read_rows(batch.set_column(index, column, pa.array([[None, value]], kind)))


def test_a_trained_token_in_no_sampled_turn_is_refused() -> None:
    batch = make_batch([([1, 2], [False, True])])
    turns = pa.array([[]], batch.schema.field("turns").type)
    with pytest.raises(ValueError, match="no sampled turn"):
        read_rows(batch.set_column(batch.schema.get_field_index("turns"), "turns", turns))


@given(st.integers(1, 6), st.integers(1, 4))
def test_groups_stay_whole_when_split(num_groups: int, num_parts: int) -> None:
    rows = read_rows(make_batch(grouped_rows(num_groups, 2)))
    parts = split_groups(rows, num_parts, np.random.default_rng(0))
    assert sum(len(part) for part in parts) == len(rows)
    groups = [{row.group for row in part} for part in parts]
    assert sum(len(part) for part in groups) == len(set().union(*groups)) == num_groups


@given(batches, st.integers(1, 60), st.integers(1, 4))
def test_shares_have_equally_many_microbatches_and_each_token_is_in_one(
    rows: list[tuple[list[int], list[bool]]], max_tokens: int, num_parts: int
) -> None:
    own = read_rows(told_apart(rows))
    shares = [share(own, part, num_parts, max_tokens) for part in range(num_parts)]
    assert len({len(microbatches) for microbatches in shares}) == 1
    shared = [x for microbatches in shares for m in microbatches for x in m.policy_versions.tolist()]
    packed = [x for m in pack(own, max_tokens) for x in m.policy_versions.tolist()]
    assert sorted(shared) == sorted(packed)
