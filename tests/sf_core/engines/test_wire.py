from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.engines import wire
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling

ids = st.lists(st.integers(0, 2**31 - 1))
logprobs = st.lists(st.floats(-100, 0, width=32))


reasons = st.none() | st.sampled_from(FinishReason)


@given(st.builds(Chunk, st.text(), ids, logprobs, st.integers(0, 9), reasons))
def test_chunks_cross_the_wire_unchanged(chunk: Chunk) -> None:
    kind, value = wire.unpack(wire.pack_chunks([chunk]))
    assert (kind, wire.unpack_chunks(value)) == ("chunks", [chunk])


sampling = st.builds(Sampling, st.floats(0, 2), st.floats(0, 1), st.integers(0, 9), st.integers(0, 2**64 - 1))


@given(
    st.builds(
        GenerationRequest,
        st.text(),
        ids,
        st.integers(0, 9),
        st.integers(1, 9),
        st.lists(st.integers(0, 9)).map(tuple),
        sampling,
        st.booleans(),
    )
)
def test_requests_cross_the_wire_unchanged(request: GenerationRequest) -> None:
    kind, value = wire.unpack(wire.pack_requests([request]))
    assert (kind, wire.unpack_requests(value)) == ("submit", [request])


def test_log_probs_keep_every_bit_of_their_float32_value() -> None:
    exact = float(np.float32(-0.1))
    _, value = wire.unpack(wire.pack_chunks([Chunk("r", [1], [exact], 0)]))
    assert wire.unpack_chunks(value)[0].logprobs == [exact]


@pytest.mark.parametrize("frame", [b"\x01", b"\x80", b"\xff\xff"])
def test_a_frame_that_is_not_ours_is_refused(frame: bytes) -> None:
    with pytest.raises(ValueError):
        wire.unpack(frame)
