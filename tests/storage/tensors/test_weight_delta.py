"""Deltas between versions: exact for every bit pattern, small where little changed, refused when damaged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import files
from storage.run_directory import RunDirectory
from storage.tensors.tensor_bytes import TensorBytes, parse
from storage.tensors.weight_delta import Delta, encode, load_delta, open_base, save_delta
from storage.tensors.weights import DIGEST, pack_weights, save_weights
from tests.bench.refusals import check_sentence

Versions = tuple[TensorBytes, TensorBytes]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.bool)


def content(tensors: TensorBytes) -> bytes:
    return tensors.header.encode() + bytes(tensors.data)


def digest(tensors: TensorBytes) -> str:
    return tensors.header.metadata[DIGEST]


def writable(tensors: TensorBytes) -> TensorBytes:
    return parse("copy", memoryview(bytearray(content(tensors))))


def pair(seed: int = 0, num: int = 5000, changed: int = 50, dtype: torch.dtype = torch.bfloat16) -> Versions:
    """Versions 3 and 4 of three tensors; this many elements of the first have changed."""
    random = np.random.default_rng(seed)
    before = {"w": torch.from_numpy(random.normal(size=num)).to(dtype), "same": torch.ones(4, 5).bfloat16()}
    before["none"] = torch.zeros(0, 3).bfloat16()
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["w"][torch.from_numpy(random.permutation(num)[:changed])] *= 3
    return pack_weights(before, 3), pack_weights(after, 4)


@st.composite
def versions(draw: st.DrawFn) -> Versions:
    """Two versions of tensors of any shapes and bit patterns, NaNs included."""
    before = {}
    after = {}
    for number in range(draw(st.integers(0, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.sampled_from([(), (0,), (1,), (3, 0), (700,), (13, 101)]))
        random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        size = int(np.prod(shape)) * dtype.itemsize
        old = random.integers(0, 2 if dtype is torch.bool else 256, size, np.uint8)
        share = draw(st.sampled_from([0.0, 0.001, 0.2, 1.0]))
        flips = random.random(size) < share
        new = np.where(flips, old ^ 1, old)
        for tensors, values in ((before, old), (after, new)):
            bits = torch.from_numpy(values.copy())
            tensors[f"t{number}"] = (bits.view(dtype) if size else bits.to(dtype)).reshape(shape)
    return pack_weights(before, 3), pack_weights(after, 4)


@given(versions())
def test_a_delta_leads_from_one_version_to_the_next_bit_for_bit(both: Versions) -> None:
    base, new = both
    delta = encode(base, new, 4)
    if delta is None:
        changed = sum(int((base.words(n) != new.words(n)).sum()) for n in base.header.entries)
        assert changed, "what has not changed costs nothing"
        return
    copy = writable(base)
    Delta("delta", content(delta)).apply(copy, digest(base), digest(new))
    assert bytes(copy.data) == bytes(new.data)


@pytest.mark.parametrize("gap", [1, 2, 255, 256, 257, 510, 511, 100_000])
def test_changes_may_be_as_far_apart_as_they_like(gap: int) -> None:
    before = torch.zeros(3 * gap + 1000, dtype=torch.bfloat16)
    after = before.clone()
    after[gap - 1 : 3 * gap : gap] = float("nan")
    base = pack_weights({"w": before}, 3)
    new = pack_weights({"w": after}, 4)
    delta = encode(base, new, 4)
    copy = writable(base)
    assert delta is not None
    Delta("delta", content(delta)).apply(copy, digest(base), digest(new))
    assert bytes(copy.data) == bytes(new.data)


@given(st.data())
def test_a_delta_that_was_cut_or_has_a_flipped_bit_is_refused(data: st.DataObject) -> None:
    delta = encode(*pair(), 4)
    assert delta is not None
    whole = content(delta)
    damaged = bytearray(whole)
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        del damaged[place:]
    else:
        damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError) as refused:
        Delta("weights/delta.safetensors", bytes(damaged))
    check_sentence(str(refused.value), "weights/delta.safetensors")


def test_a_delta_of_another_base_or_to_another_version_is_refused_and_changes_nothing() -> None:
    (base, new) = pair()
    (other, _) = pair(seed=1)
    delta = encode(base, new, 4)
    assert delta is not None
    read = Delta("delta", content(delta))
    copy = writable(other)
    for ends in ((digest(other), digest(new)), (digest(base), digest(other))):
        with pytest.raises(ValueError) as refused:
            read.apply(copy, *ends)
        check_sentence(str(refused.value), "leads from version 3 to version 4")
    assert bytes(copy.data) == bytes(other.data)


def test_a_base_that_is_not_what_its_digest_says_is_noticed() -> None:
    base, new = pair()
    delta = encode(base, new, 4)
    assert delta is not None
    for name in ("w", "same"):
        copy = writable(base)
        copy.words(name)[:] = 1
        with pytest.raises(ValueError, match="did not give the weights of version 4"):
            Delta("delta", content(delta)).apply(copy, digest(base), digest(new))
    lacking = writable(pack_weights({"same": torch.ones(4, 5).bfloat16()}, 3))
    with pytest.raises(ValueError, match="the delta changes 'w', which these weights lack"):
        Delta("delta", content(delta)).apply(lacking, digest(base), digest(new))


def test_a_delta_is_small_where_little_changed_and_left_out_where_much_did() -> None:
    base, new = pair(num=200_000, changed=8_000)
    delta = encode(base, new, 4)
    assert delta is not None and len(delta.data) < 0.05 * len(new.data)
    assert encode(*pair(changed=5000), 4) is None
    wider = pack_weights({"w": torch.zeros(5000)}, 3)
    assert encode(wider, new, 4) is None, "tensors of other names or dtypes"


def test_a_version_has_the_delta_of_its_last_try_or_none(run_anywhere: RunDirectory) -> None:
    folder = run_anywhere.weights_dir(4)
    (base, new) = pair()
    ref = save_delta(folder, base, new, 4)
    assert ref is not None and ref.uri == run_anywhere.path("weights/v00004/delta.safetensors")
    delta = load_delta(folder)
    assert delta is not None
    copy = writable(base)
    delta.apply(copy, digest(base), digest(new))
    assert bytes(copy.data) == bytes(new.data)
    assert save_delta(folder, *pair(changed=5000), 4) is None
    assert load_delta(folder) is None and not files.exists(ref.uri)
    assert save_delta(folder, *pair(changed=5000), 4) is None


def test_a_stored_version_is_a_base_if_it_is_whole_and_of_the_same_tensors(
    run_anywhere: RunDirectory,
) -> None:
    folder = run_anywhere.weights_dir(3)
    (_, new) = pair()
    assert open_base(folder, new) is None
    uri = save_weights(folder, {"w": torch.zeros(5000)}, 3)[0].uri
    assert open_base(folder, new) is None
    shapes = {"w": (5000,), "same": (4, 5), "none": (0, 3)}
    save_weights(folder, {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}, 3)
    base = open_base(folder, new)
    assert base is not None and not base.words("w").any()
    files.write_atomic(uri, files.read_bytes(uri)[:-1])
    assert open_base(folder, new) is None
