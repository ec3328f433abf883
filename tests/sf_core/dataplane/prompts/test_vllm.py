"""Our prompts are those of vLLM's own renderer, and sessions extend what they recorded with them, except as
the table of docs/guides/agents/prompts.md says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sf_core.dataplane.prompts.exceptions import ROWS, VLLM, Case, explained
from tests.sf_core.dataplane.prompts.folders import FOLDERS, KINDS
from tests.sf_core.dataplane.prompts.recorded import converse
from tests.sf_core.dataplane.prompts.references import Ids, VllmPrompts, ours
from tests.sf_core.dataplane.prompts.shapes import ON_VLLM, Shape, completion
from tests.sf_core.dataplane.prompts.strategies import shapes
from tests.sf_core.dataplane.prompts.test_transformers import TEXTS, cases, of_gateway, of_session, told

SHAPES = 30
"""Number of shapes for each kind of folder."""


@pytest.fixture(scope="module")
def served(vllm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPrompts]:
    served = VllmPrompts(vllm, FOLDERS, tmp_path_factory.mktemp("vllm") / "log")
    yield served
    served.close()


@pytest.fixture(scope="module")
def vllm_prompts(served: VllmPrompts) -> Callable[[Case], Ids | None]:
    """vLLM's prompt of a case; None: it refuses."""
    return lambda case: served.ids(case.kind, case.tokenizer, case.request)


@pytest.mark.parametrize("at", FOLDERS, ids="-".join)
def test_texts_to_continue_are_encoded_as_by_vllm(at: tuple[str, str], served: VllmPrompts) -> None:
    for text, fields in TEXTS:
        theirs = served.ids(*at, completion(text, **fields))
        assert theirs is not None and ours(*at, completion(text, **fields)) == theirs, text
        again = completion(theirs, **fields)
        assert served.ids(*at, again) == ours(*at, again) == theirs, "ids are as they are"


@pytest.mark.parametrize("kind", KINDS)
def test_our_prompts_are_those_of_vllm(kind: str, vllm_prompts: Callable[[Case], Ids | None]) -> None:
    @settings(max_examples=SHAPES)
    @given(at=st.sampled_from([one for one in FOLDERS if one[0] == kind]), shape=shapes())
    def compare(at: tuple[str, str], shape: Shape) -> None:
        for case in cases(at, shape):
            if case.dialect in ON_VLLM:
                theirs = vllm_prompts(case)
                assert of_gateway(case) == theirs or explained(case, VLLM), told(case, theirs)

    compare()


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_recorded_ids_is_rendered_by_vllm(
    kind: str, vllm_prompts: Callable[[Case], Ids | None]
) -> None:
    @settings(max_examples=SHAPES // 2)
    @given(
        at=st.sampled_from([one for one in FOLDERS if one[0] == kind]),
        shape=shapes(),
        seed=st.integers(0, 2**32),
    )
    def compare(at: tuple[str, str], shape: Shape, seed: int) -> None:
        for case in cases(at, shape):
            if case.dialect in ON_VLLM and not explained(case, VLLM):
                for continued in converse(case, vllm_prompts, seed):
                    assert continued.asked == continued.recorded + continued.new, case.request.body

    compare()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_table_differs_from_vllm_where_it_says_so(
    name: str, vllm_prompts: Callable[[Case], Ids | None]
) -> None:
    example = ROWS[name].example
    matches = ROWS[name].differs_from(VLLM)
    assert (of_session(example) != vllm_prompts(example)) == (matches is not None)
    assert matches is None or explained(example, VLLM) == [name]
