"""Our prompts are those of transformers, and sessions extend what they recorded with them; where they are not,
the table of docs/your-agent.md says so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples
from tests.sf_core.dataplane.prompts.exceptions import (
    ROWS,
    SAME,
    TRANSFORMERS,
    VLLM,
    Case,
    explained,
    read_table,
)
from tests.sf_core.dataplane.prompts.folders import FOLDERS, renderer
from tests.sf_core.dataplane.prompts.recorded import converse
from tests.sf_core.dataplane.prompts.references import Ids, ours, transformers_ids
from tests.sf_core.dataplane.prompts.shapes import WRITERS, Shape
from tests.sf_core.dataplane.prompts.strategies import shapes


def of_gateway(case: Case) -> Ids | None:
    return ours(case.kind, case.tokenizer, case.request)


def of_transformers(case: Case) -> Ids | None:
    return transformers_ids(case.kind, case.tokenizer, case.shape)


def cases(folder: tuple[str, str], shape: Shape) -> list[Case]:
    """The shape in each dialect that can say it."""
    return [Case(*folder, name, shape) for name, write in WRITERS.items() if write(shape) is not None]


def told(case: Case, theirs: Ids | None) -> str:
    """What a failure shows."""
    shown = renderer(case.kind, case.tokenizer).shown
    texts = [None if ids is None else shown(ids) for ids in (of_gateway(case), theirs)]
    return f"{case.kind}, {case.tokenizer}: {case.request.body}\nours:   {texts[0]!r}\ntheirs: {texts[1]!r}"


@settings(max_examples=examples(300))
@given(folder=st.sampled_from(FOLDERS), shape=shapes())
def test_our_prompts_are_those_of_transformers(folder: tuple[str, str], shape: Shape) -> None:
    for case in cases(folder, shape):
        theirs = of_transformers(case)
        assert of_gateway(case) == theirs or explained(case, TRANSFORMERS), told(case, theirs)


@settings(max_examples=examples(300))
@given(folder=st.sampled_from(FOLDERS), shape=shapes(), seed=st.integers(0, 2**32))
def test_what_follows_recorded_ids_is_rendered_as_without_them(
    folder: tuple[str, str], shape: Shape, seed: int
) -> None:
    for case in cases(folder, shape):
        for continued in converse(case, of_gateway, seed):
            assert continued.asked == continued.recorded + continued.new, case.request.body


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.example.recorded])
def test_a_row_of_the_table_differs_from_transformers_where_it_says_so(name: str) -> None:
    row = ROWS[name]
    assert row.matches(row.example)
    assert (of_gateway(row.example) != of_transformers(row.example)) == (TRANSFORMERS in row.differs)


def test_the_table_is_that_of_the_docs() -> None:
    table = read_table()
    assert [*table] == [*ROWS]
    for name, row in ROWS.items():
        for reference in (VLLM, TRANSFORMERS):
            assert (table[name][reference] != SAME) == (reference in row.differs), name
