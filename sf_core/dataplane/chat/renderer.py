"""Text to ids and back, by the tokenizer, chat template and end-of-turn tokens of the run's model folder.

Owns the suffix rule: what a request adds to recorded ids is cut from the rendering at an end-of-turn token.
Uses tokenizers and jinja2 directly, because transformers imports torch: 3 s and 250 MB.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from copy import copy
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from sf_core.dataplane.chat.json_text import encode_sorted
from sf_core.dataplane.chat.messages import Message
from sf_core.dataplane.chat.template_probes import append_only_roles, render_addition, shows_tools
from sf_core.dataplane.chat.tool_formats import FORMATS, Tool, format_of
from sf_core.dataplane.errors import ApiError
from sf_core.models.token_bytes import control_tokens
from sf_core.types import Ids
from storage.files import local_folder
from storage.tensors.weights import WEIGHT_FILES

MAX_VARIANTS = 16
"""Number of sets of template options whose renderers are kept."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Renderer:
    """The tokenizer and chat template of one folder. Raises ValueError with one sentence if the folder lacks
    tokenizer.json, a chat template or an end-of-turn token."""

    def __init__(self, model_dir: str) -> None:
        self.model_dir = model_dir
        folder = Path(local_folder(model_dir, WEIGHT_FILES))
        if not (folder / "tokenizer.json").exists():
            raise ValueError(
                f"{model_dir}: no tokenizer.json; save the tokenizer there too, as a fast one: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        if not (template := _read_template(folder, config)):
            raise ValueError(
                f"{model_dir}: the tokenizer has no chat template; put one there as chat_template.jinja, for "
                "example that of the model's instruct version"
            )
        self.tool_format = str(config.get("tool_format") or format_of(template))
        if self.tool_format not in FORMATS:
            raise ValueError(f"{model_dir}: unknown tool_format {self.tool_format!r}; known: {[*FORMATS]}")
        self.thinks = "</think>" in template
        """Answers may begin with reasoning between think tags."""
        self.control_tokens = frozenset(control_tokens(self._tokenizer))
        """What tokens show that are no text."""
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.num_ids = max(self.vocab_size, _num_rows(folder))
        """Number of ids that the policy may sample; networks are often padded beyond the vocabulary."""
        self._template = _compile(template)
        self._special = {name: _text(config[name]) for name in _SPECIAL if config.get(name)}
        self.stop_texts = self._read_stops(folder)
        self.stop_token_ids = tuple(self.stop_texts)
        self.options: dict[str, Any] = {}
        """Further variables of the template."""
        self._variants: dict[bytes, Renderer] = {}
        self._look_at_template()

    def with_options(self, options: dict[str, Any]) -> Renderer:
        """This renderer with further variables of the template. Raises TemplateError if the template refuses
        them."""
        if not options:
            return self
        key = encode_sorted(options)
        if key not in self._variants:
            variant = copy(self)
            variant.options = options
            variant._look_at_template()
            if len(self._variants) == MAX_VARIANTS:
                del self._variants[next(iter(self._variants))]
            self._variants[key] = variant
        return self._variants[key]

    def _look_at_template(self) -> None:
        self.opens_thinking = self.thinks and self._opens_thinking()
        """The prompt itself ends with the opening think tag."""
        self._append_only_roles = append_only_roles(self.render)
        self.shows_tools = shows_tools(self.render)
        """A prompt with a tool differs from one without."""

    def render(self, messages: list[Message], tools: list[dict[str, Any]]) -> str:
        """The prompt text for the next assistant turn. Raises TemplateError if the template refuses, or fails
        on, these messages."""
        try:
            return self._template.render(
                self._special | self.options,
                messages=messages,
                tools=tools or None,
                add_generation_prompt=True,
            )
        except jinja2.TemplateError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error

    def is_append_only(self, added: list[Message]) -> bool:
        """Whether these messages, added after an answer, leave the rendering of earlier ones unchanged."""
        return {message["role"] for message in added} <= self._append_only_roles

    def render_addition(
        self, messages: list[Message], opening_text: str, added: list[Message], tools: list[Tool]
    ) -> str | None:
        """See template_probes.render_addition."""
        return render_addition(self.render, messages, opening_text, added, tools)

    def note_rewrite(self, added: list[Message]) -> None:
        """The template rewrote earlier messages despite the probes: render everything from now on."""
        if self.is_append_only(added):
            self._append_only_roles = frozenset()

    def last_stop(self, text: str, ids: Ids) -> tuple[int, int] | None:
        """Offsets of the last end-of-turn token in a text and in its ids; None if it has none."""
        places = np.flatnonzero(np.logical_or.reduce([ids == stop for stop in self.stop_texts]))
        at = max(text.rfind(stop) for stop in self.stop_texts.values())
        return (at, int(places[-1])) if at >= 0 and len(places) else None

    def encode(self, text: str) -> Ids:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def shown(self, ids: list[int]) -> str:
        """Text with special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _opens_thinking(self) -> bool:
        prompt = self.render([{"role": "user", "content": "hi"}], [])
        return prompt.rstrip().endswith("<think>")

    def suffix_after_turn(self, rest: str, last_id: int | None) -> str | None:
        """What follows a recorded turn, given the rendering of that turn and everything after it.

        The turn's own text in `rest` is never encoded: its ids are recorded. None if the rendering shows no
        end of the turn."""
        ends = [(at, token) for token, text in self.stop_texts.items() if (at := rest.find(text)) >= 0]
        if not ends:
            return None
        at, token = min(ends)
        return rest[at + len(self.stop_texts[token]) :] if token == last_id else rest[at:]

    def _read_stops(self, folder: Path) -> dict[int, str]:
        generation = _read_json(folder / "generation_config.json").get("eos_token_id")
        ids = set(generation if isinstance(generation, list) else [generation]) - {None}
        if "eos_token" in self._special:
            ids.add(self._tokenizer.token_to_id(self._special["eos_token"]))
        stops = {token: str(self._tokenizer.id_to_token(token)) for token in sorted(ids - {None})}
        if not stops:
            raise ValueError(f"{folder}: the tokenizer names no eos_token, so no turn could end")
        return stops


def shows(text: str, answer: Message) -> bool:
    """Whether a rendered answer holds, in whatever spelling, every character that the answer says but white
    space and control characters, which JSON escapes. A template that drops something, such as old reasoning,
    has rewritten the answer."""
    said = Counter[str](answer["content"])
    said.update(answer.get("reasoning_content") or "")
    values = [call["function"] for call in answer.get("tool_calls", ())]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        else:
            said.update(value if isinstance(value, str) else json.dumps(value))
    return all(unseen.isspace() or not unseen.isprintable() for unseen in said - Counter(text))


class TextStream:
    """Turns ids into text piece by piece. A piece is held back while it ends inside a character."""

    def __init__(self, renderer: Renderer) -> None:
        self._decode = renderer.decode
        self._ids: list[int] = []
        self._start = 0
        """Decoding starts one piece back, because a decoder may look at the token before."""
        self._done = 0

    def push(self, ids: list[int]) -> str:
        self._ids += ids
        before = self._decode(self._ids[self._start : self._done])
        text = self._decode(self._ids[self._start :])
        if text.endswith(_REPLACEMENT) or len(text) <= len(before):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        before = self._decode(self._ids[self._start : self._done])
        return self._decode(self._ids[self._start :])[len(before) :]


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def _num_rows(folder: Path) -> int:
    """Rows of the network's last layer by its configuration; 0 if that does not say."""
    config = _read_json(folder / "config.json")
    return int(config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 0)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_template(folder: Path, config: dict[str, Any]) -> str:
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return str(template or "")


def _compile(source: str) -> jinja2.Template:
    # the environment that transformers gives to chat templates
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    # one date for the whole run: at midnight the prompts of running sessions must not change
    now = datetime.now()
    environment.globals["strftime_now"] = now.strftime
    template = environment.from_string(source)
    # jinja copies it for each rendering, and a ChainMap copies slowly
    template.globals = dict(template.globals)
    return template


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def open_renderer(model_dir: str) -> Renderer:
    """Raises ValueError with one sentence if the folder cannot be used, OSError if it cannot be read."""
    try:
        return Renderer(model_dir)
    except OSError:
        raise
    except Exception as error:  # a broken tokenizer.json raises a plain Exception
        if type(error) is ValueError:
            raise
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{model_dir}: tokenizer or template is broken: {told}") from error


async def read_renderer(model_dir: str) -> Renderer:
    """Raises ApiError if the folder cannot be used."""
    try:
        return await asyncio.to_thread(open_renderer, model_dir)
    except (ValueError, OSError) as error:
        raise ApiError(400, str(error), param="model_dir") from error
