"""Our prompts are those of transformers, and sessions extend what they recorded with them, except as the
table of docs/guides/agents/prompts.md says."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.sessions.session import Session
from tests.bench.dataplane import planes, prompts
from tests.bench.properties import examples

SPOKEN = prompts.shapes.Shape(
    (
        prompts.shapes.Said("system", ("be",)),
        prompts.shapes.Said("user", ("hi",)),
        prompts.shapes.Said("assistant", ("said",), "because"),
        prompts.shapes.Said("user", ("and?",)),
    )
)
CALLED = prompts.shapes.Shape(
    (
        prompts.shapes.Said("user", ("hi",)),
        prompts.shapes.Said("assistant", calls=(prompts.shapes.Call("c12345678", "find", '{"x": 1}'),)),
        prompts.shapes.Said("tool", ("found",), answers="c12345678"),
    ),
    ({"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}},),
)


def of_transformers(case: prompts.exceptions.Case) -> prompts.references.Ids | None:
    return prompts.references.transformers_ids(case.kind, case.tokenizer, case.shape)


@pytest.mark.parametrize("at", prompts.folders.FOLDERS, ids="-".join)
def test_an_ordinary_session_is_rendered_as_by_transformers(at: tuple[str, str]) -> None:
    for case in [*prompts.cases.cases(at, SPOKEN), *prompts.cases.cases(at, CALLED)]:
        theirs = of_transformers(case)
        assert theirs is not None or case.shape is CALLED  # Gemma knows no tools
        assert prompts.cases.of_gateway(case) == theirs or prompts.exceptions.explained(
            case, prompts.exceptions.TRANSFORMERS
        ), prompts.cases.told(case, theirs)


@pytest.mark.parametrize("at", prompts.folders.FOLDERS, ids="-".join)
def test_texts_to_continue_are_encoded_as_by_transformers(at: tuple[str, str]) -> None:
    for text, fields in prompts.cases.TEXTS:
        theirs = prompts.folders.transformers_tokenizer(*at).encode(text, **fields)
        assert prompts.references.ours(*at, prompts.shapes.completion(text, **fields)) == list(theirs), text
        assert prompts.references.ours(*at, prompts.shapes.completion(list(theirs), **fields)) == list(
            theirs
        ), "ids are as they are"


@pytest.mark.parametrize(
    ("kind", "ends"),
    [("llama3", ["<|begin_of_text|>", None]), ("mistral", ["<s>", "</s>"]), ("qwen3", [None, None])],
)
def test_texts_to_continue_begin_and_end_with_the_special_tokens_of_the_tokenizer(
    kind: str, ends: list[str | None]
) -> None:
    shown = prompts.folders.renderer(kind, "byte_level").decode_with_special
    plain = prompts.references.ours(
        kind, "byte_level", prompts.shapes.completion("the fox", add_special_tokens=False)
    )
    added = prompts.references.ours(kind, "byte_level", prompts.shapes.completion("the fox"))
    assert plain is not None and added is not None and shown(plain) == "the fox"
    assert shown(added) == f"{ends[0] or ''}the fox{ends[1] or ''}"


@settings(max_examples=examples(200))
@given(at=st.sampled_from(prompts.folders.FOLDERS), shape=prompts.strategies.shapes())
def test_our_prompts_are_those_of_transformers(at: tuple[str, str], shape: prompts.shapes.Shape) -> None:
    for case in prompts.cases.cases(at, shape):
        theirs = of_transformers(case)
        assert prompts.cases.of_gateway(case) == theirs or prompts.exceptions.explained(
            case, prompts.exceptions.TRANSFORMERS
        ), prompts.cases.told(case, theirs)


@settings(max_examples=examples(200))
@example(at=("mistral", "byte_level"), shape=CALLED, seed=0)
@example(at=("qwen3", "byte_level"), shape=CALLED, seed=0)
@example(at=("llama3", "first"), shape=SPOKEN, seed=0)
@given(
    at=st.sampled_from(prompts.folders.FOLDERS), shape=prompts.strategies.shapes(), seed=st.integers(0, 2**32)
)
def test_what_follows_recorded_ids_is_rendered_as_without_them(
    at: tuple[str, str], shape: prompts.shapes.Shape, seed: int
) -> None:
    for case in prompts.cases.cases(at, shape):
        for continued in prompts.recorded.converse(case, prompts.cases.of_gateway, seed):
            assert continued.asked == continued.recorded + continued.new, case.request.body


@pytest.mark.parametrize("name", prompts.exceptions.ROWS)
def test_a_row_of_the_table_differs_from_transformers_where_it_says_so(name: str) -> None:
    example = prompts.exceptions.ROWS[name].example
    matches = prompts.exceptions.ROWS[name].differs_from(prompts.exceptions.TRANSFORMERS)
    assert (prompts.cases.of_session(example) != of_transformers(example)) == (matches is not None)
    assert (matches is not None) == (
        name in prompts.exceptions.explained(example, prompts.exceptions.TRANSFORMERS)
    )


def test_what_the_table_says_of_recorded_answers_keeps_their_ids() -> None:
    [example] = [row.example for row in prompts.exceptions.ROWS.values() if row.example.recorded]
    asked, recorded = prompts.recorded.continue_recorded(example)
    assert asked[: len(recorded)] == recorded
    assert prompts.cases.of_gateway(example) != asked


def test_the_table_is_that_of_the_docs() -> None:
    table = prompts.exceptions.read_table()
    assert [*table] == [*prompts.exceptions.ROWS]
    for name, row in prompts.exceptions.ROWS.items():
        for reference in (prompts.exceptions.VLLM, prompts.exceptions.TRANSFORMERS):
            says_same = table[name][reference] == prompts.exceptions.SAME
            assert says_same == (row.differs_from(reference) is None), name


@pytest.mark.parametrize("dialect", prompts.shapes.WRITERS)
def test_an_engine_gets_the_prompt_over_http(served_plane: planes.ServedPlane, dialect: str) -> None:
    served_plane.model_dir = prompts.folders.folder("qwen3", "byte_level")
    served_plane.register(context_length=8192)
    served_plane.connect(planes.answering(prompts.folders.renderer("qwen3", "byte_level"), "said"))
    case = prompts.exceptions.Case("qwen3", "byte_level", dialect, CALLED)
    response = served_plane.http.post(case.request.path, json=case.request.body)
    assert response.status_code == 200, response.text
    assert list(served_plane.asked[0].prompt_ids) == prompts.cases.of_gateway(case)


@pytest.mark.parametrize(
    ("kind", "tokenizer"), [at for at in prompts.folders.FOLDERS if at[0] not in ("gemma3", "smollm2")]
)
def test_a_call_that_must_be_made_begins_as_in_the_whole_text(kind: str, tokenizer: str) -> None:
    made = prompts.folders.renderer(kind, tokenizer)
    tool = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {}}}
    asked = [{"role": "user", "content": "ask"}]
    forced = FORMATS[made.tool_format].opening(tool)
    prompt = Session("s").open_prompt(asked, [tool], made, forced)
    assert prompt.full_ids().tolist() == made.encode(made.render(asked, [tool]) + forced).tolist()
