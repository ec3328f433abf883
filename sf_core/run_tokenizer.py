"""The tokenizer a run started from, read from its directory alone, and single tokens as bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from storage import files
from storage.run_directory import RunDirectory
from storage.weights import WEIGHT_FILES


def open_tokenizer(run: RunDirectory) -> Any | None:
    """The run's tokenizer; None for a run without one, like those of the scripted engine."""
    if not files.exists(files.join(run.start_dir, "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    folder = files.local_folder(run.start_dir, exclude=WEIGHT_FILES)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def token_bytes(tokenizer: Any | None, ids: Iterable[int]) -> list[bytes]:
    """What each token adds to the text, in bytes: a token may hold only a part of a UTF-8 character.

    Without a tokenizer, and for ids it does not know, the id itself is shown.
    """
    ids = list(ids)
    if tokenizer is None:
        return [f"{token_id} ".encode() for token_id in ids]
    added = {int(token_id) for token_id in tokenizer.added_tokens_decoder}
    kinds = _decoder_kinds(tokenizer)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    return [
        f"<{token_id}>".encode()
        if piece is None
        else piece.encode()
        if token_id in added
        else _piece_bytes(piece, kinds)
        for token_id, piece in zip(ids, pieces, strict=True)
    ]


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """The steps by which the `tokenizers` library turns pieces into text; empty: it joins them by spaces."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    return {step["type"] for step in [decoder, *decoder.get("decoders", [])] if "type" in step}


def _piece_bytes(piece: str, kinds: set[str]) -> bytes:
    if "ByteLevel" in kinds:
        table = _byte_of_character()
        return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
    if "ByteFallback" in kinds and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)):
        return bytes.fromhex(byte[1])
    if "WordPiece" in kinds:
        return piece[2:].encode() if piece.startswith("##") else f" {piece}".encode()
    if not kinds:
        return f"{piece} ".encode()
    return piece.replace("\u2581", " ").encode()  # SentencePiece's mark of a space


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write every byte as one printable character (Radford et al. 2019)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
