"""The lower bound of the number of tokens, and the ids of long texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sf_core.dataplane.chat.renderer import LONG_CHARACTERS, Renderer
from sf_core.dataplane.chat.token_bound import TokenBound
from tests.bench import dataplane
from tests.bench.dataplane.prompts import folders

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["the quick brown", "<|im_end|>", "  ", "\n\n", "\u2581", "----", "K", "\u0301", "\u212a"]
        ),
        st.sampled_from(dataplane.tokenizers.CORPUS),
        st.text(max_size=20),
    ),
    max_size=60,
).map("".join)


@pytest.fixture(scope="module")
def tokenizers() -> Iterator[list[Tokenizer]]:
    """That of the tests, the same with NFC, those of the templates, and one whose tokens take blanks."""
    with TemporaryDirectory() as at:
        dataplane.tokenizers.make_model_dir(Path(at))
        path = f"{at}/tokenizer.json"
        plain, composing, stripping = (Tokenizer.from_file(path) for _ in range(3))
        composing.normalizer = normalizers.NFC()
        stripping.add_tokens([AddedToken("<|end|>", rstrip=True, lstrip=True)])
        others = {Path(folders.folder(*one)) / "tokenizer.json" for one in folders.FOLDERS}
        yield [plain, composing, stripping, *map(Tokenizer.from_file, map(str, sorted(others)))]


@given(text=TEXTS)
def test_no_text_has_fewer_tokens(tokenizers: list[Tokenizer], text: str) -> None:
    for tokenizer in tokenizers:
        bound = TokenBound(tokenizer)
        for one in (text, text * 7, text + "<|end|>   \n"):
            num_tokens = len(tokenizer.encode(one, add_special_tokens=False).ids)
            assert bound(one) <= num_tokens
            assert bound(one, enough=5) <= num_tokens


def test_a_text_that_is_far_too_long_is_seen(renderer: Renderer) -> None:
    for text in ("the log says 12 errors at /usr/lib/x.py:30\n", " ", "naïve 数学 "):
        assert renderer.min_num_tokens(text * 200_000, 2048) >= 2048


def test_tokens_that_drop_text_have_no_bound() -> None:
    model = models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    words = Tokenizer(model)
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert TokenBound(words)("a " * 1000) == 0
    few = Tokenizer(models.BPE({"a": 0}, []))
    few.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    few.decoder = decoders.ByteLevel()
    assert TokenBound(few)("abab" * 1000) == 0


@given(text=TEXTS)
def test_long_texts_have_the_ids_that_the_tokenizer_gives(tokenizers: list[Tokenizer], text: str) -> None:
    long = text * (LONG_CHARACTERS // (len(text) or 1) + 1)
    for tokenizer in tokenizers:
        [fast] = tokenizer.encode_batch_fast([long], add_special_tokens=False)
        assert fast.ids == tokenizer.encode(long, add_special_tokens=False).ids
