import math

import pyarrow as pa
import pytest

from sf_core.training.packing.rows import read_rows
from tests.bench.training.batches import make_batch


@pytest.mark.parametrize("column", ["weights", "advantages"])
def test_a_batch_without_weights_counts_each_token_and_one_without_advantages_teaches_nothing(
    column: str,
) -> None:
    batch = make_batch([([1, 2], [False, True]), ([3, 4, 5], [False, True, True])])
    nothing = pa.nulls(2, batch.schema.field(column).type)
    rows = read_rows(batch.set_column(batch.schema.get_field_index(column), column, nothing))
    expected = 1.0 if column == "weights" else 0.0
    assert [getattr(row, column).tolist() for row in rows] == [[expected] * 2, [expected] * 3]


def test_rows_the_filter_rejected_are_left_out() -> None:
    batch = make_batch([([1, 2], [False, True]), ([3, 4], [False, True])])
    index = batch.schema.get_field_index("decision")
    rows = read_rows(batch.set_column(index, "decision", [["train", "zero_variance"]]))
    assert [row.token_ids.tolist() for row in rows] == [[1, 2]]


def test_a_sampled_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        read_rows(make_batch([([1, 2], [True, True])]))


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
    index = batch.schema.get_field_index(column)
    kind = batch.schema.field(column).type
    with pytest.raises(ValueError, match=f"trains a token without a {lacks}"):
        read_rows(batch.set_column(index, column, pa.array([[None, value]], kind)))


def test_a_trained_token_in_no_sampled_turn_is_refused() -> None:
    batch = make_batch([([1, 2], [False, True])])
    turns = pa.array([[]], batch.schema.field("turns").type)
    with pytest.raises(ValueError, match="no sampled turn"):
        read_rows(batch.set_column(batch.schema.get_field_index("turns"), "turns", turns))
