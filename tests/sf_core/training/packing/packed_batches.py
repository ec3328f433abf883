"""Batches of short rows that often start alike."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import strategies as st

from tests.bench.training.batches import make_batch

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
