"""The contract of dialects, as tests: a test class inherits from DialectTests and reads as clients do.

Needs no pytest. The test class best uses the package that agents use, and gives it the bytes of a response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import msgspec

from sf_core.dataplane.chat.answer_parser import Reasoning
from sf_core.dataplane.chat.messages import (
    IMAGE,
    Message,
    assistant_message,
    chain_keys,
    comparable_answer,
    list_image_parts,
)
from sf_core.dataplane.chat.tool_formats import ToolCall
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.protocol import MAX_TURNS, Dialect, Reply
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.answer import Answer, Event, Pieces, TokenLogprob
from sf_core.dataplane.turns.request import TurnRequest

NUM_PROMPT_TOKENS = 3
NUM_SAMPLED_TOKENS = 4
Fields = Mapping[str, Any]
HI: Message = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class Heard:
    """An answer as a client reads it."""

    text: str
    end: str
    """Why it ended, as the dialect says it."""
    usage: tuple[int, int]
    """Tokens of the prompt and sampled tokens, of all answers to the request together."""
    calls: Sequence[tuple[str, str, Mapping[str, Any]]] = ()
    """Id, name and arguments of its tool calls."""
    reasoning: str = ""
    logprobs: Sequence[float] = ()
    more: Any = field(default=None, repr=False)
    """What else a stream has to say as the whole answer does."""


class DialectTests:
    dialect: Dialect
    request: Fields
    """A body that asks for one answer to the text "hi", and for the usage of a stream."""
    max_tokens = "max_tokens"
    """Name of the field that bounds an answer."""
    samples: str | None = None
    """Name of the field for the number of answers; None: a request has one answer."""
    with_logprobs: Fields | None = None
    """Fields that ask for log-probs; None: the dialect has none."""
    has_messages = True
    """False: it continues texts, and has neither tool calls nor reasoning."""
    ends: Mapping[str, str]
    """How it says `stop`, `length` and, with messages, `tool_calls`."""
    kind_of_error = "type"
    """Name of the field of an error that says of what kind it is."""
    refused: Sequence[tuple[Fields, str]] = ()
    """Changes of the request that are refused, and what the sentence says."""
    addressed: Sequence[Fields] = ()
    """Changes of the request that show an image whose bytes are elsewhere."""

    def show(self, data: str) -> Sequence[Fields]:
        """Changes of the request that show this image, base64, behind the text "look": said by a user, and
        in the result of a tool. None: the dialect has no images."""
        return ()

    def hear(self, body: bytes) -> list[Heard]:
        """The answers of a whole response."""
        raise NotImplementedError

    def hear_stream(self, body: bytes) -> list[Heard]:
        """The answers of a streamed response. Raises an exception that says why if the stream failed."""
        raise NotImplementedError

    def next_request(self, body: bytes) -> dict[str, Any]:
        """The request of a client that sends this whole response back, with the results of its calls."""
        raise NotImplementedError

    def models(self, listed: dict[str, Any]) -> list[str]:
        """The names of a list of models."""
        return [entry["id"] for entry in listed["data"]]

    def test_a_request_says_what_is_asked(self) -> None:
        asked = {self.max_tokens: 7, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "stream": True}
        [request] = self._parse(asked)
        sampling = request.sampling
        limits = (request.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k)
        assert limits == (7, 0.5, 0.9, 4)
        assert request.stream and request.num_samples == 1
        given = request.messages if self.has_messages else request.text_or_ids
        assert given == ([HI] if self.has_messages else HI["content"])
        [plain] = self._parse({})
        assert not plain.stream

    def test_sampling_is_bounded_by_what_engines_can_compute(self) -> None:
        for asked, used in ((1e-44, 0.01), (1e-38, 0.01), (0.01, 0.01), (0.02, 0.02), (0, 0.0)):
            [request] = self._parse({"temperature": asked, "top_p": asked})
            assert request.sampling.temperature == used
            assert request.sampling.top_p == max(asked, 1e-6)
        [request] = self._parse({"top_k": 10**9})
        assert request.sampling.top_k == 10**9
        try:
            [request] = self._parse({"top_k": 2**64 - 1})
        except ApiError as error:
            assert error.status == 400
        else:
            assert request.sampling.top_k == 2**31 - 1

    def test_wrong_fields_are_refused_in_one_sentence(self) -> None:
        wrong: list[tuple[Fields, str]] = [
            ({self.max_tokens: 0}, f"{self.max_tokens} must be at least 1"),
            ({self.max_tokens: "many"}, f"{self.max_tokens} must be an integer, got a string"),
            ({"temperature": 9}, "temperature must be between 0 and"),
            ({"top_p": -1}, "top_p must be between 0 and 1"),
            ({"stream": "yes"}, "stream must be true or false, got a string"),
        ]
        if self.samples is not None:
            wrong += [({self.samples: 0}, f"{self.samples} must be at least 1")]
            wrong += [({self.samples: MAX_TURNS + 1}, f"{self.samples} must be at most {MAX_TURNS}")]
        for change, sentence in [*wrong, *self.refused]:
            try:
                self._parse(change)
            except ApiError as error:
                assert error.status == 400
                assert sentence in error.message and "\n" not in error.message, (change, error.message)
            else:
                raise AssertionError(f"{change} was accepted")

    def test_a_stream_says_what_the_whole_answer_says(self) -> None:
        for answer in self._answers():
            [whole] = self.hear(self._reply({}).whole([answer]))
            assert (whole.text, whole.reasoning) == (answer.content, answer.reasoning)
            made = [(call.call_id, call.name, msgspec.json.decode(call.arguments)) for call in answer.calls]
            assert [tuple(call) for call in whole.calls] == made
            assert whole.end == self.ends[answer.finish_reason]
            assert whole.usage == (NUM_PROMPT_TOKENS, NUM_SAMPLED_TOKENS)
            for size in (1, 3, 1000):
                streamed = _stream(self._reply({"stream": True}), [answer], size)
                assert self.hear_stream(streamed) == [whole], f"in pieces of {size} characters"
                assert len(list(read_events(streamed))) > 1
            # of which one comes where nothing is sampled for a while (observed.py)
            with_empty_lines = streamed.replace(b"\n\n", b"\n\n\n")
            assert self.hear_stream(with_empty_lines) == [whole]

    def test_samples_come_in_their_order(self) -> None:
        if self.samples is None:
            return
        asked = {self.samples: 3}
        [request] = self._parse(asked)
        assert request.num_samples == 3
        answers = [_answer(text) for text in ("one", "", "three and more")]
        usage = (NUM_PROMPT_TOKENS, 3 * NUM_SAMPLED_TOKENS)
        for heard in (
            self.hear(self._reply(asked).whole(answers)),
            self.hear_stream(_stream(self._reply(asked | {"stream": True}), answers, 2)),
        ):
            assert [one.text for one in heard] == [answer.content for answer in answers]
            assert {one.usage for one in heard} == {usage}

    def test_log_probs_are_those_of_the_tokens(self) -> None:
        if self.with_logprobs is None:
            return
        [asked] = self._parse(self.with_logprobs)
        [plain] = self._parse({})
        assert asked.logprobs and not plain.logprobs
        # the last token, which ends inside a character, comes without text
        sampled = [TokenLogprob(text, text.encode(), -0.5 * i) for i, text in enumerate(("to", "be", ""))]
        answer = replace(_answer("tobe"), logprobs=sampled)
        [whole] = self.hear(self._reply(self.with_logprobs).whole([answer]))
        assert list(whole.logprobs) == [-0.0, -0.5, -1.0]
        reply = self._reply({**self.with_logprobs, "stream": True})
        streamed = reply.start(NUM_PROMPT_TOKENS)
        for token in sampled:
            texts: list[Event] = [token.text] if token.text else []
            streamed += reply.piece(0, Pieces(texts, [token]))
        streamed += reply.end_turn(0, answer)
        streamed += reply.end([answer])
        [heard] = self.hear_stream(streamed)
        assert heard == whole

    def test_an_answer_sent_back_is_the_recorded_message(self) -> None:
        for answer in self._answers() if self.has_messages else ():
            self.check_sent_back(answer)

    def test_errors_are_told_before_a_stream_and_in_it(self) -> None:
        for status in (400, 401, 404, 409, 413, 429, 500, 503):
            error = ApiError(status, f"It is {status} and so.", code="some_code", param="x")
            body = msgspec.json.decode(msgspec.json.encode(self.dialect.error_body(error, "req_1")))
            assert body["error"]["message"] == error.message and body["error"][self.kind_of_error]
            reply = self._reply({"stream": True})
            started = reply.start(NUM_PROMPT_TOKENS)
            failed = reply.fail(error, "req_1")
            event, *_ = read_events(failed)
            assert event["error"] == body["error"]
            try:
                self.hear_stream(started + failed)
            except Exception as raised:  # whatever the client has for it
                assert error.message in str(raised)
            else:
                raise AssertionError("the client did not raise the error that ended the stream")

    def test_multimodal_policies_are_shown_images(self) -> None:
        for change in self.show("QUJD"):
            [request] = self.dialect.parse({**self.request, **change}, Session("s"), True)
            assert not request.left_out.kinds
            [sent_image] = request.left_out.images
            assert sent_image.data == "QUJD"
            assert sent_image.where
            [shown] = [message for message in request.messages if list_image_parts([message])]
            text, image = shown["content"]
            assert text == {"type": "text", "text": "look"}
            assert image == {"type": IMAGE}
            assert image is sent_image.part

    def test_others_are_told_that_something_is_left_out(self) -> None:
        said, *results = self.show("QUJD") or [{}]
        try:
            self._parse(said)
        except ApiError as error:
            assert error.status == 400 and "support" in error.message
        else:
            assert not said
        for [request] in map(self._parse, results):
            assert request.left_out.kinds == [IMAGE] and not request.left_out.images
            assert request.messages[-1]["content"] == "look\n[image left out]"

    def test_nothing_is_fetched(self) -> None:
        for change in self.addressed:
            try:
                self.dialect.parse({**self.request, **change}, Session("s"), True)
            except ApiError as error:
                assert error.status == 400 and "not downloaded" in error.message
            else:
                raise AssertionError(f"{change} was accepted")

    def test_models_are_listed(self) -> None:
        for names in ([], ["policy"], ["a", "b/c"]):
            listed = msgspec.json.decode(msgspec.json.encode(self.dialect.model_list(names)))
            assert self.models(listed) == names

    def check_sent_back(self, answer: Answer) -> None:
        """A client that sends this answer back sends the recorded message, with its reasoning."""
        body = self._reply({}).whole([answer])
        [request] = self.dialect.parse(self.next_request(body), Session("s"))
        sent_back = [
            comparable_answer(message) if message["role"] == "assistant" else message
            for message in request.messages[:2]
        ]
        assert chain_keys([], sent_back) == chain_keys([], [HI, comparable_answer(answer.message)])
        assert request.messages[1].get("reasoning_content") == answer.message.get("reasoning_content")

    def _parse(self, change: Fields) -> list[TurnRequest]:
        return self.dialect.parse({**self.request, **change}, Session("s"))

    def _reply(self, change: Fields) -> Reply:
        return self.dialect.reply({**self.request, **change}, "s.0.0", Session("s"))

    def _answers(self) -> list[Answer]:
        texts = ["hello", "naïve 数学 \U0001f600\n\n", ""]
        plain = [*map(_answer, texts), replace(_answer("cut"), finish_reason="length")]
        if not self.has_messages:
            return plain
        calls = [ToolCall("calc", {"expression": "1+1", "deep": [{"a": None}]}), ToolCall("now", {})]
        called = [
            replace(_answer(text, made, thought), finish_reason="tool_calls")
            for text, made, thought in (("", calls[:1], ""), ("Sure. ", calls, ""), ("So: ", calls, "hm, so"))
        ]
        return [*plain, _answer("Yes.", [], "hm, so"), *called]


def _answer(text: str, calls: Sequence[ToolCall] = (), reasoning: str = "") -> Answer:
    message = assistant_message(text, list(calls), "s.0.0", reasoning)
    return Answer("s.0.0", message, "stop", None, NUM_PROMPT_TOKENS, NUM_SAMPLED_TOKENS, None)


def _stream(reply: Reply, answers: list[Answer], size: int) -> bytes:
    """The bytes of a stream in which texts come in pieces of `size` characters, answers in turns."""
    sent = [reply.start(NUM_PROMPT_TOKENS)]
    cut_answers = [_cut_answer(answer, size) for answer in answers]
    for events in zip_longest(*cut_answers):
        for i, event in enumerate(events):
            if event is not None:
                sent.append(reply.piece(i, Pieces([event], None)))
    sent += [reply.end_turn(i, answer) for i, answer in enumerate(answers)]
    sent.append(reply.end(answers))
    return b"".join(sent)


def _cut_answer(answer: Answer, size: int) -> list[Event]:
    thought = [Reasoning(part) for part in _cut(answer.reasoning, size)]
    return [*thought, *_cut(answer.content, size), *answer.calls]


def _cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def read_events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, which are JSON objects; a named one has its name as type."""
    events = []
    assert stream.endswith(b"\n\n")
    for block in stream.removesuffix(b"\n\n").split(b"\n\n"):
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
        assert fields.keys() <= {b"event", b"data"}
        if fields[b"data"] != b"[DONE]":
            event = msgspec.json.decode(fields[b"data"])
            assert isinstance(event, dict) and fields.get(b"event", b"").decode() in ("", event.get("type"))
            events.append(event)
    return events
