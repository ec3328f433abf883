"""The pictures of one session, numbered by their first appearance in the messages of its prompts. Its tokens
hold names made of these numbers in place of placeholders (sf_core/pictures/spans.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from sf_core.dataplane.chat.messages import Message, list_pictures
from sf_core.pictures.sight import Sight
from sf_core.pictures.spans import find_pictures, name_of, restore_placeholders
from sf_core.types import Ids, PictureSpan

PICTURE_BYTES = 300
"""Measured memory of a number and a size."""

Namer = Callable[[Ids], Ids]
"""Puts names into the ids with which a prompt's rendering ends, where each picture is one placeholder."""


class Pictures:
    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, int]] = {}
        """Heights and widths by hash, in the order of their numbers."""

    @property
    def num_bytes(self) -> int:
        return PICTURE_BYTES * len(self._sizes)

    def note(self, messages: Iterable[Message]) -> None:
        """Number the pictures of a new prompt's messages."""
        for part in list_pictures(messages):
            self._sizes.setdefault(part["sha256"], (part["height"], part["width"]))

    def namer(self, messages: Iterable[Message], sight: Sight | None) -> Namer:
        """For a prompt of these messages, of which the last may be new."""
        if sight is None:
            return lambda ids: ids
        numbers = {sha256: number for number, sha256 in enumerate(self._sizes)}
        names = []
        lengths = []
        for part in list_pictures(messages):
            names.append(name_of(numbers.setdefault(part["sha256"], len(numbers))))
            lengths.append(sight.count_tokens(part["height"], part["width"]))

        def name(ids: Ids) -> Ids:
            places = np.flatnonzero(ids == sight.token_id)
            if not len(places):
                return ids
            named = ids.copy()
            repeats = np.ones(len(ids), np.int64)
            named[places] = names[-len(places) :]
            repeats[places] = lengths[-len(places) :]
            return np.repeat(named, repeats)

        return name

    def read(self, named: Ids, sight: Sight) -> tuple[Ids, list[PictureSpan]]:
        """The ids as the network reads them, and where which picture is."""
        spans = [
            PictureSpan(sha256, 0, sight.count_tokens(height, width), height, width)
            for sha256, (height, width) in self._sizes.items()
        ]
        return restore_placeholders(named, sight.token_id), find_pictures(named, spans)
