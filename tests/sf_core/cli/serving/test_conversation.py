"""How a conversation is printed."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from sf_core.cli.serving.conversation import Printer, SessionPrinter
from sf_core.config import PolicyConfig
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.dataplane.sessions.session import Session
from sf_core.models.builtin import make_policy


def test_an_image_is_printed_as_what_it_is_and_as_one_placeholder(tmp_path: Path) -> None:
    make_policy(str(tmp_path), PolicyConfig(sees=True, hidden_size=32, num_layers=1), seed=0)
    renderer = open_renderer(str(tmp_path))
    session = Session("s")
    printed = io.StringIO()
    image = {"type": "image", "sha256": "0" * 64, "width": 112, "height": 84}
    shown = [{"type": "text", "text": "Look: "}, image, {"type": "text", "text": " here"}]
    session.open_prompt([{"role": "user", "content": shown}], [], renderer)
    SessionPrinter(Printer(Console(file=printed, width=200)), renderer, session).print_new()
    told = printed.getvalue()
    assert "[image, 112 by 84]" in told
    assert "Look: <|vision_start|><|image_pad|><|vision_end|> here<|im_end|>" in told
