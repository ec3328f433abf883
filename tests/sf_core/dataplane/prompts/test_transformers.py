"""Our prompts are those of transformers, and sessions extend what they recorded with them, except as the
table of docs/guides/agents/prompts.md says."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.sessions.session import Session
from tests.bench.dataplane.planes import ServedPlane, answering
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
from tests.sf_core.dataplane.prompts.folders import FOLDERS, folder, renderer, transformers_tokenizer
from tests.sf_core.dataplane.prompts.recorded import continue_recorded, converse
from tests.sf_core.dataplane.prompts.references import Ids, ours, transformers_ids
from tests.sf_core.dataplane.prompts.shapes import WRITERS, Call, Said, Shape, completion
from tests.sf_core.dataplane.prompts.strategies import shapes

SPOKEN = Shape(
    (
        Said("system", ("be",)),
        Said("user", ("hi",)),
        Said("assistant", ("said",), "because"),
        Said("user", ("and?",)),
    )
)
CALLED = Shape(
    (
        Said("user", ("hi",)),
        Said("assistant", calls=(Call("c12345678", "find", '{"x": 1}'),)),
        Said("tool", ("found",), answers="c12345678"),
    ),
    ({"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}},),
)


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


def of_transformers(case: Case) -> Ids | None:
    return transformers_ids(case.kind, case.tokenizer, case.shape)


def cases(at: tuple[str, str], shape: Shape) -> list[Case]:
    """The shape in each dialect that can say it."""
    return [Case(*at, name, shape) for name, write in WRITERS.items() if write(shape) is not None]


def told(case: Case, theirs: Ids | None) -> str:
    """What a failure shows."""
    shown = renderer(case.kind, case.tokenizer).decode_with_special
    texts = [None if ids is None else shown(ids) for ids in (of_gateway(case), theirs)]
    return f"{case.kind}, {case.tokenizer}: {case.request.body}\nours:   {texts[0]!r}\ntheirs: {texts[1]!r}"


@pytest.mark.parametrize("at", FOLDERS, ids="-".join)
def test_an_ordinary_session_is_rendered_as_by_transformers(at: tuple[str, str]) -> None:
    for case in [*cases(at, SPOKEN), *cases(at, CALLED)]:
        theirs = of_transformers(case)
        assert theirs is not None or case.shape is CALLED  # Gemma knows no tools
        assert of_gateway(case) == theirs or explained(case, TRANSFORMERS), told(case, theirs)


@pytest.mark.parametrize("at", FOLDERS, ids="-".join)
def test_texts_to_continue_are_encoded_as_by_transformers(at: tuple[str, str]) -> None:
    for text, fields in TEXTS:
        theirs = transformers_tokenizer(*at).encode(text, **fields)
        assert ours(*at, completion(text, **fields)) == list(theirs), text
        assert ours(*at, completion(list(theirs), **fields)) == list(theirs), "ids are as they are"


@pytest.mark.parametrize(
    ("kind", "ends"),
    [("llama3", ["<|begin_of_text|>", None]), ("mistral", ["<s>", "</s>"]), ("qwen3", [None, None])],
)
def test_texts_to_continue_begin_and_end_with_the_special_tokens_of_the_tokenizer(
    kind: str, ends: list[str | None]
) -> None:
    shown = renderer(kind, "byte_level").decode_with_special
    plain = ours(kind, "byte_level", completion("the fox", add_special_tokens=False))
    added = ours(kind, "byte_level", completion("the fox"))
    assert plain is not None and added is not None and shown(plain) == "the fox"
    assert shown(added) == f"{ends[0] or ''}the fox{ends[1] or ''}"


@settings(max_examples=examples(200))
@given(at=st.sampled_from(FOLDERS), shape=shapes())
def test_our_prompts_are_those_of_transformers(at: tuple[str, str], shape: Shape) -> None:
    for case in cases(at, shape):
        theirs = of_transformers(case)
        assert of_gateway(case) == theirs or explained(case, TRANSFORMERS), told(case, theirs)


@settings(max_examples=examples(200))
@example(at=("mistral", "byte_level"), shape=CALLED, seed=0)
@example(at=("qwen3", "byte_level"), shape=CALLED, seed=0)
@example(at=("llama3", "first"), shape=SPOKEN, seed=0)
@given(at=st.sampled_from(FOLDERS), shape=shapes(), seed=st.integers(0, 2**32))
def test_what_follows_recorded_ids_is_rendered_as_without_them(
    at: tuple[str, str], shape: Shape, seed: int
) -> None:
    for case in cases(at, shape):
        for continued in converse(case, of_gateway, seed):
            assert continued.asked == continued.recorded + continued.new, case.request.body


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_table_differs_from_transformers_where_it_says_so(name: str) -> None:
    example = ROWS[name].example
    matches = ROWS[name].differs_from(TRANSFORMERS)
    assert (of_session(example) != of_transformers(example)) == (matches is not None)
    assert (matches is not None) == (name in explained(example, TRANSFORMERS))


def test_what_the_table_says_of_recorded_answers_keeps_their_ids() -> None:
    [example] = [row.example for row in ROWS.values() if row.example.recorded]
    asked, recorded = continue_recorded(example)
    assert asked[: len(recorded)] == recorded
    assert of_gateway(example) != asked


def test_the_table_is_that_of_the_docs() -> None:
    table = read_table()
    assert [*table] == [*ROWS]
    for name, row in ROWS.items():
        for reference in (VLLM, TRANSFORMERS):
            says_same = table[name][reference] == SAME
            assert says_same == (row.differs_from(reference) is None), name


@pytest.mark.parametrize("dialect", WRITERS)
def test_an_engine_gets_the_prompt_over_http(served_plane: ServedPlane, dialect: str) -> None:
    served_plane.model_dir = folder("qwen3", "byte_level")
    served_plane.register(context_length=8192)
    served_plane.connect(answering(renderer("qwen3", "byte_level"), "said"))
    case = Case("qwen3", "byte_level", dialect, CALLED)
    response = served_plane.http.post(case.request.path, json=case.request.body)
    assert response.status_code == 200, response.text
    assert list(served_plane.asked[0].prompt_ids) == of_gateway(case)


@pytest.mark.parametrize(("kind", "tokenizer"), [at for at in FOLDERS if at[0] not in ("gemma3", "smollm2")])
def test_a_call_that_must_be_made_begins_as_in_the_whole_text(kind: str, tokenizer: str) -> None:
    made = renderer(kind, tokenizer)
    tool = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {}}}
    asked = [{"role": "user", "content": "ask"}]
    forced = FORMATS[made.tool_format].opening(tool)
    prompt = Session("s").open_prompt(asked, [tool], made, forced)
    assert prompt.full_ids().tolist() == made.encode(made.render(asked, [tool]) + forced).tolist()
