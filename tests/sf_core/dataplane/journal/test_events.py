"""Arrays of events, on every Python and numpy: aliases of types differ between them (docs/decisions/063)."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.dataplane.journal.journal_file import Event, encode, make_decoder
from sf_core.types import Ids


class Arrays(Event, tag="arrays"):
    ids: Ids
    logprobs: npt.NDArray[np.float32]
    trained: npt.NDArray[np.bool_]
    counts: npt.NDArray[np.int64]
    written_out: np.ndarray[tuple[int], np.dtype[np.uint8]]
    parts: list[npt.NDArray[np.float64]]


TYPES = {"ids": "i4", "logprobs": "f4", "trained": "?", "counts": "i8", "written_out": "u1", "parts": "f8"}
read = make_decoder(Arrays)


@given(st.binary(max_size=64), st.integers(0, 3))
def test_an_array_comes_back_with_its_values_and_its_type(data: bytes, num_parts: int) -> None:
    def cut(dtype: str) -> npt.NDArray[np.generic]:
        size = np.dtype(dtype).itemsize
        whole = np.frombuffer(data[: len(data) // size * size], "u1" if dtype == "?" else dtype)
        return whole > 127 if dtype == "?" else whole

    arrays = {name: cut(dtype) for name, dtype in TYPES.items()}
    found = read(encode(Arrays(**arrays | {"parts": [arrays["parts"]] * num_parts})))  # type: ignore[arg-type]
    assert len(found.parts) == num_parts
    for name, expected in arrays.items():
        for array in found.parts if name == "parts" else [getattr(found, name)]:
            assert array.dtype == expected.dtype
            assert array.tobytes() == expected.tobytes()


def test_bytes_that_are_no_array_of_the_type_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="buffer size must be a multiple"):
        read(msgspec.msgpack.encode(["arrays", b"123", *[b""] * 4, []]))
