"""The contract of engines that hold answers to grammars, with a tokenizer of few tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sf_core.engines.protocol import StepEngine
from sf_core.testing.engines import awake, catch, drain, ids_of
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling
from tests.bench.engines.model_contract import FolderEngineTests
from tests.bench.engines.model_folders import STOP, VOCABULARY
from tests.bench.properties import examples

SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 3, "pattern": "^[a-z]*$"},
        {"enum": ["red", "green", "a b"]},
        {"const": "sum"},
    ]
)


def objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(["a", "b_c"]), values, max_size=2).map(
        lambda named: {
            "type": "object",
            "properties": named,
            "required": [*named],
            "additionalProperties": False,
        }
    )


def arrays(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return values.map(lambda items: {"type": "array", "items": items, "maxItems": 2})


FLAT = objects(SCALARS) | arrays(SCALARS)
SCHEMAS = SCALARS | FLAT | objects(FLAT) | arrays(FLAT)


def text_of(ids: Sequence[int]) -> str:
    return "".join(VOCABULARY[token] for token in ids)


def json_grammar(schema: dict[str, Any]) -> str:
    one_line = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    return f"start: %json {json.dumps(schema | {'x-guidance': one_line})}"


class GrammarEngineTests(FolderEngineTests):
    """The start folder has the tokenizer of `write_tokenizer`."""

    budget = 95
    """More than the longest answer of `SCHEMAS`."""
    num_examples = 20

    def asked(
        self, grammar: str, name: str = "r", done: Sequence[int] = (), seed: int = 3
    ) -> GenerationRequest:
        prompt = [20, 21, 22, *done]
        return GenerationRequest(
            name, prompt, len(done), self.budget - len(done), (STOP,), self.sampling(seed), True, grammar
        )

    def test_answers_follow_their_schemas_beside_others_that_follow_none(self) -> None:
        with self.serve() as engine:
            free = replace(self.asked("", "free"), max_tokens=20)
            engine.submit(free)
            alone = ids_of(drain(engine))

            @settings(max_examples=examples(self.num_examples), deadline=None)
            @given(st.lists(SCHEMAS, min_size=1, max_size=4))
            def try_schemas(schemas: list[dict[str, Any]]) -> None:
                for i, schema in enumerate(schemas):
                    engine.submit(self.asked(json_grammar(schema), f"r{i}", seed=i))
                engine.submit(free)
                chunks = drain(engine)
                for i, schema in enumerate(schemas):
                    *ids, last = ids_of(chunks, f"r{i}")
                    assert last == STOP, (schema, text_of(ids))
                    jsonschema.validate(json.loads(text_of(ids)), schema)
                assert ids_of(chunks, "free") == alone

            try_schemas()

    def test_an_answer_that_is_interrupted_anywhere_goes_on_in_its_grammar(self) -> None:
        with self.serve() as engine:
            grammar = json_grammar(
                {"type": "array", "items": {"enum": ["red", "a b"]}, "minItems": 4, "maxItems": 4}
            )
            engine.submit(self.asked(grammar))
            whole = ids_of(drain(engine))
            assert json.loads(text_of(whole[:-1])) and len(whole) > 12
            for num in range(0, len(whole), 5):
                engine.submit(self.asked(grammar, done=whole[:num]))
                assert ids_of(drain(engine)) == whole[num:]

    def test_new_weights_and_aborts_in_the_middle_leave_an_answer_in_its_grammar(self) -> None:
        with self.serve() as engine:
            schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 9, "maxItems": 9}
            engine.submit(self.asked(json_grammar(schema)))
            chunks = self._until(engine, 5)
            chunks += awake(engine, self.weights(1))
            chunks += self._until(engine, len(ids_of(chunks)) + 3)
            chunks += engine.abort(["r"])
            done = ids_of(chunks)
            if chunks[-1].finish_reason is FinishReason.ABORT:
                engine.submit(self.asked(json_grammar(schema), done=done))
                done += ids_of(drain(engine))
            jsonschema.validate(json.loads(text_of(done[:-1])), schema)

    def test_log_probs_are_those_of_the_distribution_over_what_the_grammar_allows(self) -> None:
        with self.serve() as engine:
            request = self.asked("start: /[01]{8}/")
            engine.submit(request)
            chunks = drain(engine)
            ids = ids_of(chunks)
            got = [value for chunk in chunks for value in chunk.logprobs]
            digits = [VOCABULARY.index(digit) for digit in "01"]
            assert {*ids[:-1]} <= {*digits} and len(ids) == 9
            for at, token in enumerate(ids[:-1]):
                before = [*request.prompt_ids, *ids[:at]]
                both = [
                    float(self.logprobs(0, [*before, digit], len(before), Sampling())[0]) for digit in digits
                ]
                chosen = both[digits.index(token)]
                expected = chosen - math.log(sum(map(math.exp, both)))
                assert got[at] == pytest.approx(expected, abs=1e-3)
            assert got[-1] == pytest.approx(0, abs=1e-5)

    def test_marks_of_the_tokenizer_are_tokens_in_a_grammar(self) -> None:
        with self.serve() as engine:
            engine.submit(self.asked('start: <think> /[ab]{2}/ </think> "x"'))
            ids = ids_of(drain(engine))
            assert [VOCABULARY[token] for token in (ids[0], *ids[3:])] == [
                "<think>",
                "</think>",
                "x",
                "<end>",
            ]

    def test_a_grammar_that_cannot_be_followed_is_refused_at_once(self) -> None:
        with self.serve() as engine:
            good = self.asked('start: "a"')
            wrong = {
                "unknown special token": replace(good, grammar="start: <none>"),
                "Invalid type: strin": replace(good, grammar='start: %json {"type": "strin"}'),
                "needs a stop token": replace(good, stop_token_ids=()),
            }
            for message, request in wrong.items():
                told = str(catch(_submitting(engine, request), ValueError))
                assert message in told and "\n" not in told
            assert engine.num_requests == 0
            engine.submit(good)
            assert text_of(ids_of(drain(engine))) == "a<end>"

    def _until(self, engine: StepEngine, num_tokens: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        while engine.num_requests and len(ids_of(chunks)) < num_tokens:
            chunks += engine.step()
        return chunks


def _submitting(engine: StepEngine, request: GenerationRequest) -> Callable[[], None]:
    return lambda: engine.submit(request)
