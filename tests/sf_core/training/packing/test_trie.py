from dataclasses import replace

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Packing, pack
from tests.bench.training.batches import make_batch
from tests.sf_core.training.packing.packed_batches import batches, told_apart


@given(batches, st.integers(1, 60))
def test_every_trained_token_is_packed_once_with_what_belongs_to_it(
    rows: list[tuple[list[int], list[bool]]], max_tokens: int
) -> None:
    batch = told_apart(rows)
    packed = [
        values
        for m in pack(read_rows(batch), Packing(max_tokens))
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
    for m in pack(read_rows(told_apart(rows)), Packing(max_tokens)):
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
    (plain,) = pack([row], Packing(100))
    assert plain.old.tolist() == plain.logprobs.tolist() and plain.correction.tolist() == [1.0, 1.0]
    assert plain.reference.isnan().all()
    scored = replace(row, old=row.logprobs - 1, reference=row.logprobs - 2, correction=row.weights)
    (m,) = pack([scored], Packing(100))
    assert (m.logprobs - m.old).tolist() == [1.0, 1.0] and (m.logprobs - m.reference).tolist() == [2.0, 2.0]
    assert m.correction.tolist() == m.weights.tolist()


@given(batches, st.integers(1, 60))
def test_a_trained_token_is_predicted_from_all_the_tokens_before_it(
    rows: list[tuple[list[int], list[bool]]], max_tokens: int
) -> None:
    contexts = sorted((ids[:i], ids[i]) for ids, mask in rows for i, sampled in enumerate(mask) if sampled)
    packed = []
    for microbatch in pack(read_rows(make_batch(rows)), Packing(max_tokens)):
        width = microbatch.grid.shape[1]
        for position, target in zip(microbatch.positions.tolist(), microbatch.targets.tolist(), strict=True):
            line, column = divmod(int(microbatch.owners[position]), width)
            assert microbatch.depths[position] == column
            packed.append((microbatch.padded_ids[line, : column + 1].tolist(), target))
    assert sorted(packed) == contexts


def test_a_shared_prompt_is_there_once() -> None:
    rows = [([1, 2, 3, last], [False, False, True, True]) for last in (4, 5, 6)]
    (microbatch,) = pack(read_rows(make_batch(rows)), Packing(100))
    assert microbatch.token_ids.tolist() == [1, 2, 3]
    assert microbatch.targets.tolist() == [3, 4, 3, 5, 3, 6]


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
    (microbatch,) = pack(rows, Packing(100))
    assert microbatch.targets.tolist() == [2, 2, 4, 5]
    assert microbatch.sampling.tolist() == [(0.5, 0.25, 7), (0.5, 0.25, 7), (2.0, 1.0, 0), (2.0, 1.0, 0)]
