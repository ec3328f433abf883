"""Prompts that are compared with those of others."""

from __future__ import annotations

from tests.bench.dataplane.prompts.exceptions import Case
from tests.bench.dataplane.prompts.folders import renderer
from tests.bench.dataplane.prompts.recorded import continue_recorded
from tests.bench.dataplane.prompts.references import Ids, ours
from tests.bench.dataplane.prompts.shapes import WRITERS, Shape

TEXTS: list[tuple[str, dict[str, bool]]] = [
    (text, fields)
    for text in ("the quick fox", " naïve café\n", "<|im_start|>user", "数学", "the fox " * 200)
    for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
]
"""Texts to continue, with fields of the request; the last ones are encoded in another way than short ones."""


def of_gateway(case: Case) -> Ids | None:
    return ours(case.kind, case.tokenizer, case.request)


def of_session(case: Case) -> Ids | None:
    """In a session that recorded the answers, if the case is one of recorded answers."""
    return continue_recorded(case)[0] if case.recorded else of_gateway(case)


def cases(at: tuple[str, str], shape: Shape) -> list[Case]:
    """The shape in each dialect that can say it."""
    return [Case(*at, name, shape) for name, write in WRITERS.items() if write(shape) is not None]


def told(case: Case, theirs: Ids | None) -> str:
    """What a failure shows."""
    shown = renderer(case.kind, case.tokenizer).decode_with_special
    texts = [None if ids is None else shown(ids) for ids in (of_gateway(case), theirs)]
    return f"{case.kind}, {case.tokenizer}: {case.request.body}\nours:   {texts[0]!r}\ntheirs: {texts[1]!r}"
