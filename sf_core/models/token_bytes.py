"""Single tokens as bytes, and which of them are no text.

Imports nothing but tokenizers: vLLM's processes load it (engines/vllm/grammar_processor.py).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable

from tokenizers import Tokenizer


def control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of tokens that stand for more than their characters, by what they show: special ones, and added
    ones that look like tags, as `<think>`."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {
        token.content: int(token_id)
        for token_id, token in added
        if token.special or re.fullmatch(r"<[^<>\s]+>", token.content)
    }


def token_bytes(tokenizer: Tokenizer | None, ids: Iterable[int]) -> list[bytes]:
    """As TokenBytes does; without a tokenizer the ids themselves are shown."""
    if tokenizer is None:
        return [f"{token_id} ".encode() for token_id in ids]
    return TokenBytes(tokenizer)(ids)


class TokenBytes:
    """The bytes that each token adds to the text: a token may hold only a part of a UTF-8 character.

    Ids that the tokenizer does not know are shown themselves.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.id_to_token
        self._added = {int(token_id) for token_id in tokenizer.get_added_tokens_decoder()}
        self._kinds = _decoder_kinds(tokenizer)

    def __call__(self, ids: Iterable[int]) -> list[bytes]:
        return [self._bytes(token_id) for token_id in ids]

    def _bytes(self, token_id: int) -> bytes:
        piece = self._piece(token_id)
        if piece is None:
            return f"<{token_id}>".encode()
        return piece.encode() if token_id in self._added else _piece_bytes(piece, self._kinds)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """The steps by which the `tokenizers` library turns pieces into text; empty: it joins them by spaces."""
    # a tokenizer as text has its whole vocabulary, the state of a decoder is a line
    decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    return {step["type"] for step in [decoder, *decoder.get("decoders", [])] if "type" in step}


def _piece_bytes(piece: str, kinds: set[str]) -> bytes:
    if "ByteLevel" in kinds:
        table = byte_of_character()
        return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
    if "ByteFallback" in kinds and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)):
        return bytes.fromhex(byte[1])
    if "WordPiece" in kinds:
        return piece[2:].encode() if piece.startswith("##") else f" {piece}".encode()
    if not kinds:
        return f"{piece} ".encode()
    return piece.replace("\u2581", " ").encode()  # SentencePiece's mark of a space


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write every byte as one printable character (Radford et al. 2019): itself, or
    one that is counted up from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    bytes_of = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    for code, byte in enumerate(others, 256):
        bytes_of[chr(code)] = byte
    return bytes_of
