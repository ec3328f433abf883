"""A lower bound of the number of tokens that a tokenizer makes of a text, at the cost of counting its bytes.

A token covers the bytes that it stands for. Let each byte weigh 1 over the length of the longest token with
this byte. Then no token covers more than a weight of 1, and a text has at least as many tokens as its bytes
weigh. This holds if the tokens of a text, joined, are the text. The tokenizers for which that is known are
listed here; for others the bound is 0.

Imports nothing but tokenizers and NumPy.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

from sf_core.models.token_bytes import byte_of_character

PIECE_CHARACTERS = 65_536
"""Characters that are weighed in one step, during which no other thread runs."""

MAX_NFC_FACTOR = 4
"""Largest factor by which NFC shortens a text in UTF-8."""

_LOSSLESS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
"""Types of pre-tokenizers that drop nothing, unless their behaviour is `Removed`."""

_SPACE = "\u2581"
"""The character that SentencePiece writes for a space. A text may also contain the character itself, which
has three bytes."""

_REPEATED = " \n\t-=*#._/"
"""Characters that some tokens repeat many times, so that they weigh little. For these, the largest number in
a token gives a second bound."""

_BLANKS = [*range(0x09, 0x0E), *range(0x1C, 0x21)]
"""Bytes of ASCII white space."""


class TokenBound:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._weights = np.zeros(256)
        """Weight of each byte."""
        self._longest = 0
        """Length of the longest token in bytes. It is 0 if the bound is not known to hold for this
        tokenizer."""
        self._max_repeats = dict[int, int]()
        """Largest number of each repeated byte in a token."""
        kinds = _pipeline_steps(tokenizer.normalizer)
        self._composes = any(step["type"] == "NFC" for step in kinds)
        if all(map(_is_lossless_normalizer, kinds)) and all(
            map(_is_lossless_pre_tokenizer, _pipeline_steps(tokenizer.pre_tokenizer))
        ):
            self._weigh_tokens(tokenizer)

    def __call__(self, text: str, enough: float = float("inf")) -> int:
        """A number of tokens below which no tokenization of the text lies. The computation stops at a bound
        of `enough`."""
        if not self._longest or 4 * len(text) < enough < float("inf"):
            return 0
        counts = np.zeros(256, np.int64)
        bound = 0.0
        for start in range(0, len(text), PIECE_CHARACTERS):
            data = text[start : start + PIECE_CHARACTERS].encode()
            counts += np.bincount(np.frombuffer(data, np.uint8), minlength=256)
            bound = self._weigh(counts, min(len(text), start + PIECE_CHARACTERS))
            if bound >= enough:
                break
        # less the rounding error of a million sums
        return int(bound * (1 - 1e-9))

    def _weigh(self, counts: np.ndarray, num_characters: int) -> float:
        """The bound of a text from the counts of its bytes, which holds whatever follows the text."""
        repeated = [(int(counts[byte]), max_in_token) for byte, max_in_token in self._max_repeats.items()]
        if not self._composes:
            by_weight = float(counts @ self._weights)
            return max(by_weight, *(num_in_text / max_in_token for num_in_text, max_in_token in repeated))
        # each other character, and the next text, may be composed with an ASCII character before it
        ascii_counts = counts[:128]
        num_composed = num_characters - int(ascii_counts.sum()) + 1
        most_lost = num_composed * float(self._weights.max())
        by_weight = float(ascii_counts @ self._weights[:128]) - most_lost
        by_length = int(counts.sum()) / MAX_NFC_FACTOR / self._longest - 1
        by_repetition = [
            (num_in_text - num_composed) / max_in_token for num_in_text, max_in_token in repeated
        ]
        return max(by_weight, by_length, 0.0, *by_repetition)

    def _weigh_tokens(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        contents = {token.content for token in added}
        covered = _covers_of_tokens(
            tokenizer, [token for token in tokenizer.get_vocab() if token not in contents]
        )
        if covered is None:
            return
        covered += [_cover_of_text(content) for content in contents]
        covered.sort(reverse=True)
        self._longest = covered[0][0]
        missing = {chr(byte) for byte in range(256)}
        for length, token_bytes in covered:
            if not missing.isdisjoint(token_bytes):
                self._weights[[ord(byte) for byte in missing.intersection(token_bytes)]] = 1 / length
                missing.difference_update(token_bytes)
        texts = [token_bytes for length, token_bytes in covered if length > 1]
        self._max_repeats = {ord(byte): max(1, *(text.count(byte) for text in texts)) for byte in _REPEATED}
        if any(token.lstrip or token.rstrip for token in added):
            # such a token covers any white space beside it, of which some is not ASCII
            self._max_repeats = {
                byte: max_in_token for byte, max_in_token in self._max_repeats.items() if byte not in _BLANKS
            }
            self._weights[_BLANKS] = 0
            self._weights[128:] = 0
            self._longest = 2**62


Covered = tuple[int, str]
"""Largest number of bytes that a token covers, and these bytes, each as the character with its code."""


def _cover_of_text(text: str) -> Covered:
    data = text.encode()
    # SentencePiece's mark may also stand for a space
    return len(data), data.decode("latin-1") + " " * (_SPACE in text)


def _covers_of_tokens(tokenizer: Tokenizer, tokens: list[str]) -> list[Covered] | None:
    """The bytes that each token covers; None if several bytes may share an unknown token, or get no token."""
    model = tokenizer.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    vocabulary = set(tokens)
    if any(step["type"] == "ByteLevel" for step in _pipeline_steps(tokenizer.pre_tokenizer)):
        bytes_of = byte_of_character()
        if not vocabulary.issuperset(bytes_of):
            return None
        table = str.maketrans({character: chr(byte) for character, byte in bytes_of.items()})
        return [(len(token), token.translate(table)) for token in tokens]
    single_bytes = {f"<0x{byte:02X}>": chr(byte) for byte in range(256)}
    if not model.byte_fallback or not vocabulary.issuperset(single_bytes):
        return None
    covered = [(1, byte) for byte in single_bytes.values()]
    return covered + [_cover_of_text(token) for token in tokens]


def _pipeline_steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return list(state.get("normalizers") or state.get("pretokenizers") or [state])


def _is_lossless_normalizer(step: dict[str, Any]) -> bool:
    """Whether a step of a normalizer, other than NFC, drops no byte."""
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == _SPACE)
    return step["type"] in ("NFC", "Prepend")


def _is_lossless_pre_tokenizer(step: dict[str, Any]) -> bool:
    return step["type"] in _LOSSLESS and step.get("behavior") != "Removed"
