"""A lower bound of the number of tokens that a tokenizer makes of a text, at the cost of a look at its bytes.

A token covers the bytes that it stands for. If each byte weighs one over the length of the longest token that
has it, no token covers more than a weight of one: a text has at least as many tokens as its bytes weigh. This
holds where tokens, put together, are the text. The tokenizers of which that is known are listed here; for
others the bound is 0.

Imports nothing but tokenizers and NumPy.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

from sf_core.models.token_bytes import byte_of_character

PIECE = 65_536
"""Characters that are weighed at a time: no other thread runs meanwhile."""

MOST_SHRUNK = 4
"""Times by which NFC shortens a text in UTF-8 at most."""

_WHOLE = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
"""Kinds of pre-tokenizers that drop nothing, unless their behaviour is `Removed`."""

_SPACE = "\u2581"
"""What SentencePiece writes for a space. A text may also have the character itself, which is three bytes."""

_REPEATED = " \n\t-=*#._/"
"""Characters of which tokens have many, so that they weigh little: but then a token has many of them."""

_BLANKS = [*range(0x09, 0x0E), *range(0x1C, 0x21)]
"""Bytes of ASCII white space."""


class TokenBound:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._weights = np.zeros(256)
        """Weight of each byte."""
        self._longest = 0
        """Bytes of the longest token; 0: nothing is known of this tokenizer."""
        self._most = dict[int, int]()
        """How often a token has such a byte at most."""
        kinds = _steps(tokenizer.normalizer)
        self._composes = any(step["type"] == "NFC" for step in kinds)
        if all(map(_keeps_text, kinds)) and all(map(_keeps_pieces, _steps(tokenizer.pre_tokenizer))):
            self._weigh_tokens(tokenizer)

    def __call__(self, text: str, enough: float = float("inf")) -> int:
        """No tokenization of the text has fewer tokens. Bounds of `enough` and more may be lower than they
        could be."""
        if not self._longest or 4 * len(text) < enough < float("inf"):
            return 0
        counts = np.zeros(256, np.int64)
        bound = 0.0
        for start in range(0, len(text), PIECE):
            data = text[start : start + PIECE].encode()
            counts += np.bincount(np.frombuffer(data, np.uint8), minlength=256)
            bound = self._weigh(counts, min(len(text), start + PIECE))
            if bound >= enough:
                break
        # of the rounding of a million sums
        return int(bound * (1 - 1e-9))

    def _weigh(self, counts: np.ndarray, num_characters: int) -> float:
        """The bound of a text by the counts of its bytes, whatever follows it."""
        repeated = [(int(counts[byte]), most) for byte, most in self._most.items()]
        if not self._composes:
            by_weight = float(counts @ self._weights)
            return max(by_weight, *(num / most for num, most in repeated))
        # each other character may be composed with an ASCII one before it, as may be what follows
        ascii_counts = counts[:128]
        num_composed = num_characters - int(ascii_counts.sum()) + 1
        most_lost = num_composed * float(self._weights.max())
        by_weight = float(ascii_counts @ self._weights[:128]) - most_lost
        by_length = int(counts.sum()) / MOST_SHRUNK / self._longest - 1
        by_repetition = [(num - num_composed) / most for num, most in repeated]
        return max(by_weight, by_length, 0.0, *by_repetition)

    def _weigh_tokens(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        contents = {token.content for token in added}
        covered = _coverage(tokenizer, [token for token in tokenizer.get_vocab() if token not in contents])
        if covered is None:
            return
        covered += [_covered(content) for content in contents]
        covered.sort(reverse=True)
        self._longest = covered[0][0]
        missing = {chr(byte) for byte in range(256)}
        for length, found in covered:
            if not missing.isdisjoint(found):
                self._weights[[ord(byte) for byte in missing.intersection(found)]] = 1 / length
                missing.difference_update(found)
        texts = [found for length, found in covered if length > 1]
        self._most = {ord(byte): max(1, *(text.count(byte) for text in texts)) for byte in _REPEATED}
        if any(token.lstrip or token.rstrip for token in added):
            # such a token takes any white space beside it, of which some is not ASCII
            self._most = {byte: most for byte, most in self._most.items() if byte not in _BLANKS}
            self._weights[_BLANKS] = 0
            self._weights[128:] = 0
            self._longest = 2**62


Covered = tuple[int, str]
"""Number of bytes that a token covers at most, and these bytes, each as the character of its number."""


def _covered(text: str) -> Covered:
    data = text.encode()
    # a mark of a space stands for one, too
    return len(data), data.decode("latin-1") + " " * (_SPACE in text)


def _coverage(tokenizer: Tokenizer, tokens: list[str]) -> list[Covered] | None:
    """What each token covers; None if some bytes may get a token in common, or none."""
    model = tokenizer.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    known = set(tokens)
    if any(step["type"] == "ByteLevel" for step in _steps(tokenizer.pre_tokenizer)):
        bytes_of = byte_of_character()
        if not known.issuperset(bytes_of):
            return None
        table = str.maketrans({character: chr(byte) for character, byte in bytes_of.items()})
        return [(len(token), token.translate(table)) for token in tokens]
    single_bytes = {f"<0x{byte:02X}>": chr(byte) for byte in range(256)}
    if not model.byte_fallback or not known.issuperset(single_bytes):
        return None
    covered = [(1, byte) for byte in single_bytes.values()]
    return covered + [_covered(token) for token in tokens]


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return list(state.get("normalizers") or state.get("pretokenizers") or [state])


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a step of a normalizer drops no byte, but for NFC."""
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == _SPACE)
    return step["type"] in ("NFC", "Prepend")


def _keeps_pieces(step: dict[str, Any]) -> bool:
    return step["type"] in _WHOLE and step.get("behavior") != "Removed"
