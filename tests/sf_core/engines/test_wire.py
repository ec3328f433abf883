from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.engines import wire
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling, WeightsRef

ids = st.lists(st.integers(0, 2**31 - 1))
logprobs = st.lists(st.floats(-100, 0, width=32))


reasons = st.none() | st.sampled_from(FinishReason)


@given(st.builds(Chunk, st.text(), ids, logprobs, st.integers(0, 9), reasons))
def test_chunks_cross_the_wire_unchanged(chunk: Chunk) -> None:
    assert wire.read_from_engine(wire.pack(wire.Chunks([chunk]))) == wire.Chunks([chunk])


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
        st.text(),
    )
)
def test_requests_cross_the_wire_unchanged(request: GenerationRequest) -> None:
    submit = wire.read_from_data_plane(wire.pack(wire.Submit.of([request])))
    assert isinstance(submit, wire.Submit)
    assert submit.whole_requests() == [request]


def test_log_probs_keep_every_bit_of_their_float32_value() -> None:
    exact = float(np.float32(-0.1))
    sent = wire.read_from_engine(wire.pack(wire.Chunks([Chunk("r", [1], [exact], 0)])))
    assert isinstance(sent, wire.Chunks)
    assert sent.chunks[0].logprobs == [exact]


WELCOME = wire.Welcome(WeightsRef(0, "w"), False)
UPDATED = wire.Updated(0)


@pytest.mark.parametrize("frame", [b"", b"\x01", b"\x80", b"\xff\xff", wire.pack(WELCOME)])
def test_a_frame_that_no_engine_may_send_is_refused(frame: bytes) -> None:
    with pytest.raises(ValueError, match=r"^the engine sent an invalid message: "):
        wire.read_from_engine(frame)


@pytest.mark.parametrize("frame", [b"", b"\x01", b"\x80", b"\xff\xff", wire.pack(UPDATED)])
def test_a_frame_that_no_data_plane_may_send_is_refused(frame: bytes) -> None:
    with pytest.raises(ValueError):
        wire.read_from_data_plane(frame)
