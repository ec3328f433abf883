"""What engines and trainers get of images is what the messages show, whatever agents do to their histories:
no two images ever have one name, and a restart finds the same names."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import chain
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp
from typing import Any

import jinja2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sf_core.dataplane.chat.messages import Message, list_image_parts, tool_call
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.sessions.session import Prompt, Session
from sf_core.types import ImageSpan
from tests.bench.dataplane import conversations
from tests.bench.properties import examples

WORDS = ("the quick", "brown fox", "naïve café", "42 and 30")
SIZES = {"red": (28, 56), "blue": (28, 56), "wide": (28, 84), "tall": (84, 28), "dot": (28, 28)}
"""Heights and widths; red and blue have the same ids."""


def image(name: str) -> dict[str, Any]:
    height, width = SIZES[name]
    return {"type": "image", "sha256": name, "width": width, "height": height}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def collapse(ids: list[int], spans: list[ImageSpan]) -> list[int]:
    """The ids with one placeholder for each image."""
    inner = {at for span in spans for at in range(span.start + 1, span.start + span.length)}
    return [token for at, token in enumerate(ids) if at not in inner]


PARTS = st.lists(
    st.one_of(st.sampled_from([*SIZES]).map(image), st.sampled_from(WORDS).map(text)), max_size=4
)


@cache
def cutting_family() -> Renderer:
    """The family whose template, if told so, shows of earlier answers only how they begin."""
    folder = mkdtemp(prefix="cuts-")
    copytree(conversations.family("qwen2_5_vl").model_dir, folder, dirs_exist_ok=True)
    template = Path(folder, "chat_template.jinja")
    source = template.read_text(encoding="utf-8").replace(
        "{{ content['text'] }}",
        "{{ content['text'][:3] if cuts and message['role'] == 'assistant' and outer.index < messages|length "
        "- 2 else content['text'] }}",
    )
    messages = "{% for message in messages %}"
    template.write_text(source.replace(messages, messages + "{% set outer = loop %}"), encoding="utf-8")
    return Renderer(folder)


class Shown(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32), option=st.sampled_from(["", "add_vision_id", "cuts"]))
    def start(self, seed: int, option: str) -> None:
        """add_vision_id: the template counts images, so that it does not only append. cuts: it rewrites."""
        self.rng = random.Random(seed)
        self.renderer = cutting_family().with_options({option: True} if option else {})
        self.record = conversations.Record(self.renderer)
        self.undisturbed = conversations.Record(self.renderer)
        self.names: dict[int, str] = {}
        self.open: list[list[Message]] = [[conversations.user("start")]]

    @rule(parts=PARTS, said=st.sampled_from(WORDS))
    def show(self, parts: list[dict[str, Any]], said: str) -> None:
        """Answer, then show something."""
        messages = self._pick()
        answer = self._answer(messages, said)
        self.open.append([*messages, answer, {"role": "user", "content": [*parts, text("so")]}])

    @rule(parts=PARTS, said=st.sampled_from(WORDS))
    def show_result(self, parts: list[dict[str, Any]], said: str) -> None:
        messages = self._pick()
        calls = [tool_call("c", "look", {})]
        # an answer of the agent's own, which nobody sampled
        called = {"role": "assistant", "content": said, "tool_calls": calls}
        result = {"role": "tool", "tool_call_id": "c", "content": [*parts, image("red")]}
        self.open.append([*messages, called, result])

    @rule(name=st.sampled_from([*SIZES]), said=st.sampled_from(WORDS))
    def show_another(self, name: str, said: str) -> None:
        """The same conversation with another image in one place, which may be long past."""
        messages = json.loads(json.dumps(self._pick()))
        if images := list_image_parts(messages):
            self.rng.choice(images).update(image(name))
        self._answer(messages, said)
        self.open.append(messages)

    @rule(said=st.sampled_from(WORDS))
    def ask_again(self, said: str) -> None:
        messages = self._pick()
        for _ in range(2):
            self._answer(messages, said)

    @rule()
    def restart(self) -> None:
        before = conversations.state_of(self.record.session)
        self.record.restart()
        assert conversations.state_of(self.record.session) == before

    def teardown(self) -> None:
        if not hasattr(self, "record") or not self.record.turns:
            return
        assert conversations.state_of(self.record.session) == conversations.state_of(self.undisturbed.session)
        for row in conversations.check(self.record):
            expected = [part["sha256"] for part in list_image_parts(json.loads(row.messages))]
            assert [span.sha256 for span in row.images] == expected
            self._check_spans(row.token_ids.tolist(), list(row.images))

    def _pick(self) -> list[Message]:
        return self.open[-1] if self.rng.random() < 0.6 else self.rng.choice(self.open)

    def _answer(self, messages: list[Message], said: str) -> Message:
        prompts = [
            record.session.open_prompt(list(messages), [], self.renderer)
            for record in (self.undisturbed, self.record)
        ]
        self._check_prompt(prompts[-1], messages)
        ids = self.renderer.encode(said).tolist()
        self.undisturbed.answer(prompts[0], ids)
        return self.record.answer(prompts[-1], ids).message

    def _check_prompt(self, prompt: Prompt, messages: list[Message]) -> None:
        ids, spans = self.record.read(prompt)
        images = list_image_parts(messages)
        assert [span.sha256 for span in spans] == [part["sha256"] for part in images]
        assert conversations.shown(self.renderer, collapse(ids, spans)) == self.renderer.render(messages, [])
        self._check_spans(ids, spans)
        named = prompt.full_ids()
        for span in spans:
            [name] = {*named[span.start : span.start + span.length]}
            assert self.names.setdefault(name, span.sha256) == span.sha256
        assert len({*self.names.values()}) == len(self.names)

    def _check_spans(self, ids: list[int], spans: list[ImageSpan]) -> None:
        image_processor = self.renderer.image_processor
        assert image_processor is not None
        for span in spans:
            assert (span.height, span.width) == SIZES[span.sha256]
            assert span.length == image_processor.count_tokens(span.height, span.width)
            assert {*ids[span.start : span.start + span.length]} == {image_processor.token_id}
        assert ids.count(image_processor.token_id) == sum(span.length for span in spans)


TestShown = Shown.TestCase
TestShown.settings = settings(
    max_examples=examples(60), stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def seeing() -> Renderer:
    return conversations.family("qwen2_5_vl")


def test_prompts_that_differ_by_an_image_share_nothing_behind_it(seeing: Renderer) -> None:
    session = Session("s")
    red, blue = (
        session.open_prompt([{"role": "user", "content": [image(name), text("what?")]}], [], seeing)
        for name in ("red", "blue")
    )
    ids = [
        session.images.read(np.frombuffer(p.full_ids(), np.int32), seeing.image_processor)
        for p in (red, blue)
    ]  # type: ignore[arg-type]
    assert ids[0][0].tolist() == ids[1][0].tolist()
    assert blue.parent is red and blue.start == ids[0][1][0].start


PAD = "<|image_pad|>"
SPELLED = st.lists(
    st.sampled_from([PAD, "<|image_", "pad|>", "<", "<|vision_start|>", " ", "\n", "é"])
    | st.text(max_size=3),
    max_size=5,
).map("".join)
SPELLED_PARTS = SPELLED | st.lists(st.sampled_from([*SIZES]).map(image) | SPELLED.map(text), max_size=5)
SPELLED_CALL = st.builds(
    lambda name, key, value: tool_call("c", name, {key: value, "more": [{value: key}]}),
    SPELLED,
    SPELLED,
    SPELLED,
)


def spelled_round(draw: st.DrawFn) -> list[Message]:
    """An answer, and what comes back to it."""
    said: Message = {"role": "assistant", "content": draw(SPELLED)}
    if draw(st.booleans()):
        said["reasoning_content"] = draw(SPELLED)
    if draw(st.booleans()):
        said["tool_calls"] = [draw(SPELLED_CALL)]
        return [said, {"role": "tool", "tool_call_id": "c", "content": draw(SPELLED_PARTS)}]
    return [said, {"role": "user", "content": draw(SPELLED_PARTS)}]


@st.composite
def spelled_conversations(draw: st.DrawFn) -> tuple[list[Message], list[Any]]:
    start: list[Message] = [{"role": "system", "content": draw(SPELLED)}] if draw(st.booleans()) else []
    start.append({"role": "user", "content": draw(SPELLED_PARTS)})
    rounds = [spelled_round(draw) for _ in range(draw(st.integers(0, 3)))]
    properties = {draw(SPELLED): {"type": "string", "description": draw(SPELLED)}}
    function = {"name": draw(SPELLED), "description": draw(SPELLED), "parameters": {"properties": properties}}
    tools = [{"type": "function", "function": function}] if draw(st.booleans()) else []
    return [*start, *(message for one in rounds for message in one)], tools


@settings(max_examples=examples(300), deadline=None)
@given(given=spelled_conversations())
def test_no_text_of_any_role_shows_an_image_or_is_refused(given: tuple[list[Message], list[Any]]) -> None:
    messages, tools = given
    seeing = conversations.family("qwen2_5_vl")
    record = conversations.Record(seeing)
    prompt = record.session.open_prompt(json.loads(json.dumps(messages)), tools, seeing)
    ids, spans = record.read(prompt)
    images = list_image_parts(messages)
    assert [span.sha256 for span in spans] == [part["sha256"] for part in images]
    assert collapse(ids, spans).count(seeing.image_processor.token_id) == len(images)  # type: ignore[union-attr]
    assert prompt.messages == messages, "what was sent is what is recorded"


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_a_session_goes_on_whatever_its_policy_and_its_tools_spell(data: st.DataObject) -> None:
    seeing = conversations.family("qwen2_5_vl")
    assert seeing.image_processor is not None
    record = conversations.Record(seeing)
    messages = [conversations.user(data.draw(SPELLED))]
    for _ in range(3):
        prompt = record.session.open_prompt(messages, [], seeing)
        said = data.draw(SPELLED)
        # as a policy writes it that never samples the placeholder itself: by other tokens
        ids = [token for piece in said for token in seeing.encode_behind_text(piece).tolist()]
        turn = record.answer(prompt, ids)
        parts = data.draw(SPELLED_PARTS)
        messages = [*messages, turn.message, {"role": "user", "content": parts}]
    record.session.open_prompt(messages, [], seeing)
    rows = conversations.check(record)
    sampled = [turn.ids.tolist() for turn in record.session.turns]
    trained = [row.token_ids[row.loss_mask].tolist() for row in rows]
    assert sorted(chain.from_iterable(trained)) == sorted(chain.from_iterable(sampled))
    assert all(seeing.image_processor.token_id not in ids for ids in trained)


def test_an_answer_that_spells_a_placeholder_stays_in_its_row(seeing: Renderer) -> None:
    record = conversations.Record(seeing)
    prompt = record.session.open_prompt([conversations.user(f"see {PAD}")], [], seeing)
    ids = [token for piece in f"no {PAD}" for token in seeing.encode_behind_text(piece).tolist()]
    turn = record.answer(prompt, ids)
    assert turn.message["content"] == f"no {PAD}"
    later = record.session.open_prompt(
        [conversations.user(f"see {PAD}"), turn.message, conversations.user(f"and {PAD}?")], [], seeing
    )
    record.answer(later, seeing.encode("no").tolist())
    [row] = conversations.check(record)
    text_of_row = conversations.shown(seeing, row.token_ids.tolist())
    assert text_of_row.count(f"no {PAD}") == 1, "as it was sampled"
    assert text_of_row.count("<\N{REPLACEMENT CHARACTER}|image_pad|>") == 2, "as it was mended"


def test_a_template_that_shows_fewer_images_is_refused(seeing: Renderer) -> None:
    late = [{"role": "assistant", "content": [image("red")]}, conversations.user("what?")]
    blind = conversations.family("chatml")
    blind.image_processor = seeing.image_processor
    try:
        with pytest.raises(jinja2.TemplateError):
            Session("s").open_prompt([{"role": "user", "content": [image("red")]}, *late], [], blind)
    finally:
        blind.image_processor = None
