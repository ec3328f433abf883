"""Texts that contain the placeholder of images. The tokenizer would encode such a text as an image that
nobody sent, so a replacement character is put into the placeholder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_BREAK = "\N{REPLACEMENT CHARACTER}"

_FIELDS_WITHOUT_TEXT = ("role", "type")
"""Fields whose values a template does not put between texts."""


class Placeholder:
    def __init__(self, text: str) -> None:
        """`text`: how the tokenizer writes the placeholder."""
        self.text = text
        self._proper_prefixes = tuple(text[:length] for length in range(1, len(text)))

    def is_in(self, value: Any) -> bool:
        """Whether a text of a JSON value contains the placeholder, or its texts do when they are joined."""
        return any(self.text in text for text in _texts(value)) or self._spans_texts(value)

    def mend(self, value: Any) -> Any:
        """The value with a character more inside each placeholder, so that nothing is missing of a text.
        Templates may put the texts of a value behind each other, without the white space around them. If they
        then still spell one, each first character of a placeholder gets a character behind it."""
        if not self.is_in(value):
            return value
        first = self.text[0]
        mended = _replace(value, lambda text: text.replace(self.text, first + _BREAK + self.text[1:]))
        if self.is_in(mended):
            mended = _replace(mended, lambda text: text.replace(first, first + _BREAK))
        return mended

    def _spans_texts(self, value: Any) -> bool:
        if isinstance(value, str):
            return False
        texts = list(_texts(value, names=False))
        # joining all texts takes longer than to look for an end that could begin a placeholder
        if not any(text.rstrip().endswith(self._proper_prefixes) for text in texts[:-1]):
            return False
        without_space = "".join("".join(texts).split())
        return self.text in without_space


def _texts(value: Any, *, names: bool = True) -> Iterator[str]:
    """The texts of a value; `names` of fields are never beside another text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        if names:
            yield from value
        for name, part in value.items():
            if name not in _FIELDS_WITHOUT_TEXT:
                yield from _texts(part, names=names)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part, names=names)


def _replace(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _replace(part, change) for name, part in value.items()}
    if isinstance(value, list):
        return [_replace(part, change) for part in value]
    return value
