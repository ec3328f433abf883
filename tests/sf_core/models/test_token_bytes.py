from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sf_core.models.token_bytes import control_tokens, token_bytes
from sf_core.models.tokenizer import open_tokenizer
from storage.run_directory import RunDirectory


def tokenizer(pieces: list[str], decoder: object | None) -> Tokenizer:
    backend = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, pieces[0]))
    if decoder is not None:
        backend.decoder = decoder
    return backend


@pytest.mark.parametrize(
    ("pieces", "decoder", "expected"),
    [
        (["Ġhi", "Ã"], decoders.ByteLevel(), [b" hi", b"\xc3"]),
        (
            ["▁hi", "<0xC3>"],
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]),
            [b" hi", b"\xc3"],
        ),
        (["hi", "##gh"], decoders.WordPiece(), [b" hi", b"gh"]),
        (["hi", "you"], None, [b"hi ", b"you "]),
    ],
)
def test_a_token_is_the_bytes_it_adds(pieces: list[str], decoder: object, expected: list[bytes]) -> None:
    assert token_bytes(tokenizer(pieces, decoder), [0, 1]) == expected


def test_what_no_tokenizer_knows_is_shown_as_its_id(tmp_path: Path) -> None:
    assert open_tokenizer(RunDirectory(str(tmp_path))) is None
    assert token_bytes(None, [3, 4]) == [b"3 ", b"4 "]
    assert token_bytes(tokenizer(["hi"], None), [0, 9]) == [b"hi ", b"<9>"]


def test_every_byte_of_a_byte_level_vocabulary_is_known() -> None:
    characters = bytes_to_unicode()
    pieces = tokenizer([*characters.values()], decoders.ByteLevel())
    assert token_bytes(pieces, range(256)) == [bytes([byte]) for byte in characters]


def test_special_tokens_and_added_tags_are_no_text_and_other_added_tokens_are() -> None:
    backend = tokenizer(["hi"], decoders.Fuse())
    backend.add_special_tokens(["[END]"])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("What is ", special=False)])
    assert control_tokens(backend) == {"[END]": 1, "<think>": 2}
