"""The benchmark's kinds of sessions: every sampled token is trained once, at linear cost."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from benchmarks.capture import KINDS, Capture, make_renderer
from sf_core.dataplane.chat.messages import Message
from sf_core.dataplane.chat.renderer import Ids, Renderer
from sf_core.dataplane.sessions.session import Prompt
from tests.bench.dataplane.conversations import Record, check


class CountingRenderer(Renderer):
    """Renderer that counts its input."""

    num_rendered = 0
    num_encoded = 0

    def render(self, messages: list[Message], *rest: Any, **options: Any) -> str:
        self.num_rendered += len(messages)
        return super().render(messages, *rest, **options)

    def encode(self, text: str, after: str = "", most: float = math.inf) -> Ids:
        self.num_encoded += len(text)
        return super().encode(text, after, most)


class CheckedCapture(Capture):
    """Capture that keeps the prompts sent to the engine."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(renderer)
        self.asked: list[list[int]] = []

    def _answer(self, prompt: Prompt, num_tokens: int, start: float) -> Message:
        self.asked.append(prompt.full_ids().tolist())
        return super()._answer(prompt, num_tokens, start)


@pytest.fixture(scope="module")
def capture_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("capture"))
    make_renderer(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "scale", "num_rows", "most_row_tokens"),
    [
        ("linear", 0.1, 1, 1.0),
        ("retokenised", 0.6, 3, 2.1),
        ("sub_agents", 0.3, 11, 1.05),
        ("compaction", 0.3, 2, 1.1),
        ("parallel_agents", 0.4, 4, 1.2),
        ("asked_again", 0.2, 40, 20.0),
        ("short_turns", 0.04, 1, 1.0),
    ],
)
def test_every_sampled_token_of_any_kind_of_session_is_trained_once(
    capture_folder: str, kind: str, scale: float, num_rows: int, most_row_tokens: float
) -> None:
    capture = CheckedCapture(Renderer(capture_folder))
    KINDS[kind](capture, scale)
    turns = list(zip(capture.asked, capture.session.turns, strict=True))
    rows = check(Record(capture.renderer, capture.session, turns))
    sampled = sum(len(turn.ids) for turn in capture.session.turns)
    distinct = sampled + sum(len(prompt.ids) for prompt in {turn.prompt for _, turn in turns})
    assert len(rows) == num_rows
    assert sum(len(row.token_ids) for row in rows) <= most_row_tokens * distinct


def test_thousands_of_turns_are_rendered_and_encoded_once(capture_folder: str) -> None:
    renderer = CountingRenderer(capture_folder)
    renderer.num_rendered = 0  # without the probes
    capture = Capture(renderer)
    depth = sys.getrecursionlimit() + 500
    KINDS["short_turns"](capture, depth / 5000)
    [row] = capture.export()
    assert len(capture.session.turns) == depth
    assert row.loss_mask.sum() == sum(len(turn.ids) for turn in capture.session.turns)
    # the whole is rendered at every doubling, and a few messages on every turn
    assert renderer.num_rendered < 12 * depth
    characters = sum(
        len(message["content"]) + 40 for turn in capture.session.turns for message in turn.prompt.messages
    )
    assert renderer.num_encoded < 2 * characters
