"""Checks whether a stored conversation, rendered by the run's chat template, is the prompt that the policy
saw."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import jinja2

from sf_core.dataplane.chat.messages import Message, text_of
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.chat.tool_formats import Tool
from storage import files
from storage.run_directory import RunDirectory


class PromptChecker:
    """Renders with the tokenizer and the chat template that the run started from. Raises ValueError with one
    sentence if the run has none."""

    def __init__(self, run: RunDirectory) -> None:
        if not files.exists(files.join(run.start_dir, "tokenizer.json")):
            raise ValueError(f"run {run.run_id} has no tokenizer")
        self._renderer = Renderer(run.start_dir)

    def matches_prompt(
        self, messages: Sequence[Message], tools: list[Tool], prompt_ids: Sequence[int]
    ) -> bool:
        """Whether all messages but the last render to `prompt_ids`, the prompt from which the last was
        sampled. The prompt may end with the forced beginning of a call, which the rendering of the last
        message shows.

        Texts are compared, because sampled ids may differ from those the tokenizer makes of the same text."""
        if not messages:
            return False
        if (image_processor := self._renderer.image_processor) is not None:
            # a rendering has one placeholder for each image
            prompt_ids = [
                token
                for last, token in pairwise([-1, *prompt_ids])
                if not last == token == image_processor.token_id
            ]
        text = self._renderer.decode_with_special(list(prompt_ids))
        *before, last = messages
        try:
            prompt = self._renderer.render(before, tools)
            whole = self._renderer.render([*messages], tools) if last.get("tool_calls") else ""
        except jinja2.TemplateError:
            return False
        return any(
            text.startswith(spelling) and (text == spelling or text[len(spelling) :] in whole)
            for spelling in self._spellings(prompt)
        )

    def _spellings(self, rendered: str) -> Iterator[str]:
        """The text, and the text encoded and decoded: a decoder may leave out or add spaces."""
        yield rendered
        yield self._renderer.decode_with_special(self._renderer.encode(rendered).tolist())


def shows_whole_answer(text: str, answer: Message) -> bool:
    """Whether a rendered answer holds, in any spelling, every character of the answer except white space and
    control characters, which JSON escapes. A template that drops characters, for example of old reasoning,
    has rewritten the answer."""
    characters = Counter[str](text_of(answer))
    characters.update(answer.get("reasoning_content") or "")
    values = [call["function"] for call in answer.get("tool_calls", ())]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        else:
            characters.update(value if isinstance(value, str) else json.dumps(value))
    missing = characters - Counter(text)
    return all(character.isspace() or not character.isprintable() for character in missing)
