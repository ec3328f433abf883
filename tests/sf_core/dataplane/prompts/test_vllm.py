"""Our prompts are those of vLLM's own renderer, and sessions extend what they recorded with them, except as
the table of docs/guides/agents/prompts.md says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.dataplane import prompts
from tests.bench.dataplane.prompts import exceptions, references

SHAPES = 30
"""Number of shapes for each kind of folder."""


@pytest.fixture(scope="module")
def served(vllm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[references.VllmPrompts]:
    served = references.VllmPrompts(vllm, prompts.folders.FOLDERS, tmp_path_factory.mktemp("vllm") / "log")
    yield served
    served.close()


@pytest.fixture(scope="module")
def vllm_prompts(served: references.VllmPrompts) -> Callable[[exceptions.Case], references.Ids | None]:
    """vLLM's prompt of a case; None: it refuses."""
    return lambda case: served.ids(case.kind, case.tokenizer, case.request)


@pytest.mark.parametrize("at", prompts.folders.FOLDERS, ids="-".join)
def test_texts_to_continue_are_encoded_as_by_vllm(
    at: tuple[str, str], served: references.VllmPrompts
) -> None:
    for text, fields in prompts.cases.TEXTS:
        theirs = served.ids(*at, prompts.shapes.completion(text, **fields))
        assert (
            theirs is not None and references.ours(*at, prompts.shapes.completion(text, **fields)) == theirs
        ), text
        again = prompts.shapes.completion(theirs, **fields)
        assert served.ids(*at, again) == references.ours(*at, again) == theirs, "ids are as they are"


@pytest.mark.parametrize("kind", prompts.folders.KINDS)
def test_our_prompts_are_those_of_vllm(
    kind: str, vllm_prompts: Callable[[exceptions.Case], references.Ids | None]
) -> None:
    @settings(max_examples=SHAPES)
    @given(
        at=st.sampled_from([one for one in prompts.folders.FOLDERS if one[0] == kind]),
        shape=prompts.strategies.shapes(),
    )
    def compare(at: tuple[str, str], shape: prompts.shapes.Shape) -> None:
        for case in prompts.cases.cases(at, shape):
            if case.dialect in prompts.shapes.ON_VLLM:
                theirs = vllm_prompts(case)
                assert prompts.cases.of_gateway(case) == theirs or exceptions.explained(
                    case, exceptions.VLLM
                ), prompts.cases.told(case, theirs)

    compare()


@pytest.mark.parametrize("kind", prompts.folders.KINDS)
def test_what_follows_recorded_ids_is_rendered_by_vllm(
    kind: str, vllm_prompts: Callable[[exceptions.Case], references.Ids | None]
) -> None:
    @settings(max_examples=SHAPES // 2)
    @given(
        at=st.sampled_from([one for one in prompts.folders.FOLDERS if one[0] == kind]),
        shape=prompts.strategies.shapes(),
        seed=st.integers(0, 2**32),
    )
    def compare(at: tuple[str, str], shape: prompts.shapes.Shape, seed: int) -> None:
        for case in prompts.cases.cases(at, shape):
            if case.dialect in prompts.shapes.ON_VLLM and not exceptions.explained(case, exceptions.VLLM):
                for continued in prompts.recorded.converse(case, vllm_prompts, seed):
                    assert continued.asked == continued.recorded + continued.new, case.request.body

    compare()


@pytest.mark.parametrize("name", exceptions.ROWS)
def test_a_row_of_the_table_differs_from_vllm_where_it_says_so(
    name: str, vllm_prompts: Callable[[exceptions.Case], references.Ids | None]
) -> None:
    example = exceptions.ROWS[name].example
    matches = exceptions.ROWS[name].differs_from(exceptions.VLLM)
    assert (prompts.cases.of_session(example) != vllm_prompts(example)) == (matches is not None)
    assert matches is None or exceptions.explained(example, exceptions.VLLM) == [name]
