"""What engines and trainers get of pictures is what the messages show, whatever agents do to their histories:
no two pictures ever have one name, and a restart finds the same names."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp
from typing import Any

import jinja2
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sf_core.dataplane.chat.messages import Message, list_pictures, tool_call
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.sessions.session import Prompt, Session
from sf_core.types import PictureSpan
from tests.bench.dataplane.conversations import Record, check, family, shown, state_of, user

WORDS = ("the quick", "brown fox", "naïve café", "42 and 30")
SIZES = {"red": (28, 56), "blue": (28, 56), "wide": (28, 84), "tall": (84, 28), "dot": (28, 28)}
"""Heights and widths; red and blue have the same ids."""


def picture(name: str) -> dict[str, Any]:
    height, width = SIZES[name]
    return {"type": "image", "sha256": name, "width": width, "height": height}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def collapse(ids: list[int], spans: list[PictureSpan]) -> list[int]:
    """The ids with one placeholder for each picture."""
    inner = {at for span in spans for at in range(span.start + 1, span.start + span.length)}
    return [token for at, token in enumerate(ids) if at not in inner]


PARTS = st.lists(
    st.one_of(st.sampled_from([*SIZES]).map(picture), st.sampled_from(WORDS).map(text)), max_size=4
)


@cache
def cutting_family() -> Renderer:
    """The family whose template, if told so, shows of earlier answers only how they begin."""
    folder = mkdtemp(prefix="cuts-")
    copytree(family("qwen2_5_vl").model_dir, folder, dirs_exist_ok=True)
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
        """add_vision_id: the template counts pictures, so that it does not only append. cuts: it rewrites."""
        self.rng = random.Random(seed)
        self.renderer = cutting_family().with_options({option: True} if option else {})
        self.record, self.undisturbed = Record(self.renderer), Record(self.renderer)
        self.names: dict[int, str] = {}
        self.open: list[list[Message]] = [[user("start")]]

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
        result = {"role": "tool", "tool_call_id": "c", "content": [*parts, picture("red")]}
        self.open.append([*messages, called, result])

    @rule(name=st.sampled_from([*SIZES]), said=st.sampled_from(WORDS))
    def show_another(self, name: str, said: str) -> None:
        """The same conversation with another picture in one place, which may be long past."""
        messages = json.loads(json.dumps(self._pick()))
        if pictures := list_pictures(messages):
            self.rng.choice(pictures).update(picture(name))
        self._answer(messages, said)
        self.open.append(messages)

    @rule(said=st.sampled_from(WORDS))
    def ask_again(self, said: str) -> None:
        messages = self._pick()
        for _ in range(2):
            self._answer(messages, said)

    @rule()
    def restart(self) -> None:
        before = state_of(self.record.session)
        self.record.restart()
        assert state_of(self.record.session) == before

    def teardown(self) -> None:
        if not hasattr(self, "record") or not self.record.turns:
            return
        assert state_of(self.record.session) == state_of(self.undisturbed.session)
        for row in check(self.record):
            expected = [part["sha256"] for part in list_pictures(json.loads(row.messages))]
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
        pictures = list_pictures(messages)
        assert [span.sha256 for span in spans] == [part["sha256"] for part in pictures]
        assert shown(self.renderer, collapse(ids, spans)) == self.renderer.render(messages, [])
        self._check_spans(ids, spans)
        named = prompt.full_ids()
        for span in spans:
            [name] = {*named[span.start : span.start + span.length]}
            assert self.names.setdefault(name, span.sha256) == span.sha256
        assert len({*self.names.values()}) == len(self.names)

    def _check_spans(self, ids: list[int], spans: list[PictureSpan]) -> None:
        sight = self.renderer.sight
        assert sight is not None
        for span in spans:
            assert (span.height, span.width) == SIZES[span.sha256]
            assert span.length == sight.count_tokens(span.height, span.width)
            assert {*ids[span.start : span.start + span.length]} == {sight.token_id}
        assert ids.count(sight.token_id) == sum(span.length for span in spans)


TestShown = Shown.TestCase
TestShown.settings = settings(
    max_examples=60, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def seeing() -> Renderer:
    return family("qwen2_5_vl")


def test_prompts_that_differ_by_a_picture_share_nothing_behind_it(seeing: Renderer) -> None:
    session = Session("s")
    red, blue = (
        session.open_prompt([{"role": "user", "content": [picture(name), text("what?")]}], [], seeing)
        for name in ("red", "blue")
    )
    ids = [session.pictures.read(np.frombuffer(p.full_ids(), np.int32), seeing.sight) for p in (red, blue)]  # type: ignore[arg-type]
    assert ids[0][0].tolist() == ids[1][0].tolist()
    assert blue.parent is red and blue.start == ids[0][1][0].start


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([user("see <|image_pad|>")], "a text contains <|image_pad|>, which is reserved for pictures"),
        (
            [{"role": "user", "content": [picture("red"), text("<|image_pad|>")]}],
            "a text contains <|image_pad|>, which is reserved for pictures",
        ),
        (
            [user("hi"), {"role": "assistant", "content": "<|image_pad|>"}],
            "shows 1 pictures, but the messages have 0",
        ),
    ],
)
def test_placeholders_stand_for_pictures_alone(
    seeing: Renderer, messages: list[Message], sentence: str
) -> None:
    session = Session("s")
    with pytest.raises(jinja2.TemplateError, match=sentence.replace("|", r"\|")):
        session.open_prompt(messages, [], seeing)
    assert not session.prompts and not session.pictures.num_bytes


def test_a_template_that_shows_fewer_pictures_is_refused(seeing: Renderer) -> None:
    late = [{"role": "assistant", "content": [picture("red")]}, user("what?")]
    blind = family("chatml")
    blind.sight = seeing.sight
    try:
        with pytest.raises(jinja2.TemplateError):
            Session("s").open_prompt([{"role": "user", "content": [picture("red")]}, *late], [], blind)
    finally:
        blind.sight = None
