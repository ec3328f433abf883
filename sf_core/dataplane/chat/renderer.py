"""Text to ids and back, by the tokenizer, chat template and end-of-turn tokens of the run's model folder.

Owns the suffix rule: the text that a request adds to recorded ids begins after an end-of-turn token of the
rendering. Uses tokenizers directly, because transformers imports torch: 3 s and 250 MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import numpy as np
from tokenizers import Tokenizer

from sf_core.dataplane.chat.answer_parser import THINK_END, THINK_START
from sf_core.dataplane.chat.calls.formats import FORMATS, detect_format
from sf_core.dataplane.chat.json_text import encode_sorted
from sf_core.dataplane.chat.messages import Message, list_image_parts
from sf_core.dataplane.chat.template import DEFAULT, ChatTemplates, merge_system, read_templates
from sf_core.dataplane.chat.template_probes import (
    append_only_roles,
    find_end_of_turn,
    keeps_rows,
    shows_tools,
    with_images,
)
from sf_core.dataplane.chat.token_bound import TokenBound
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.errors import ApiError
from sf_core.models.context import count_ids
from sf_core.models.images.placeholder_text import Placeholder
from sf_core.models.images.processor_config import read_image_processor
from sf_core.models.token_bytes import TokenBytes, control_tokens
from sf_core.types import Ids, to_ids
from storage.files import local_folder, read_bytes
from storage.json_files import load_json
from storage.tensors.weights import WEIGHT_FILES

MAX_VARIANTS = 16
"""Number of sets of template options whose renderers are cached, and of templates whose roles are."""

LONG_CHARACTERS = 1000
"""Fewest characters of a text that is encoded by the method for long texts."""

Value = TypeVar("Value")

_CHANNEL = "<|channel|>"
"""The token with which each part of an answer of gpt-oss begins."""


class TooManyTokensError(ValueError):
    """A text has more tokens than the caller allows."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the text has {num_tokens} tokens")
        self.num_tokens = num_tokens


class Renderer:
    """The tokenizer and chat template of one folder. Raises ValueError with one sentence if the folder lacks
    tokenizer.json, a chat template or an end-of-turn token."""

    def __init__(self, model_dir: str) -> None:
        self.model_dir = model_dir
        folder = Path(local_folder(model_dir, WEIGHT_FILES))
        if not (folder / "tokenizer.json").exists():
            raise ValueError(
                f"{model_dir}: no tokenizer.json; save a fast tokenizer there: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        self._tokenizer = Tokenizer.from_str(read_bytes(str(folder / "tokenizer.json")).decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        sources = read_templates(folder, config)
        if not sources.get(DEFAULT):
            raise ValueError(
                f"{model_dir}: the tokenizer has no chat template; add chat_template.jinja there, for "
                "example from the model's instruct version"
            )
        configured_format = str(config.get("tool_format") or "")
        if configured_format and configured_format not in FORMATS:
            raise ValueError(
                f"{model_dir}: tool_format in tokenizer_config.json must be one of {', '.join(FORMATS)}, "
                f"got {configured_format!r}"
            )
        self.templates = ChatTemplates(sources)
        self.thinks = self.templates.contain(THINK_END)
        """Whether answers may begin with reasoning between think tags."""
        self.min_num_tokens = TokenBound(self._tokenizer)
        """Lower bound of the number of tokens of a text."""
        self.token_bytes = TokenBytes(self._tokenizer)
        self.control_tokens = control_tokens(self._tokenizer)
        """Ids of control tokens, by their text."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._skipped = {token.content: int(number) for number, token in added if token.special}
        """Ids of tokens that `decode` omits, by their text."""
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.num_ids = max(self.vocab_size, count_ids(_read_json(folder / "config.json")) or 0)
        """Number of ids that the policy may sample. Networks are often padded beyond the vocabulary."""
        self.image_processor = (
            read_image_processor(str(folder)) if (folder / "config.json").exists() else None
        )
        """That of a multimodal policy; None: the policy reads no images."""
        if (
            self.image_processor is not None
            and self._tokenizer.id_to_token(self.image_processor.token_id) is None
        ):
            raise ValueError(
                f"{model_dir}: the tokenizer has no token {self.image_processor.token_id}, which "
                "config.json names as image_token_id"
            )
        spelled = (
            None
            if self.image_processor is None
            else self._tokenizer.id_to_token(self.image_processor.token_id)
        )
        self.placeholder = None if spelled is None else Placeholder(spelled)
        """That of images; None: the policy is shown none."""
        self._special = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
        self.options: dict[str, Any] = {}
        """Further variables of the template."""
        self.stop_texts, self.template_stop = self._read_stops(folder)
        """Texts of the tokens that end a turn, by id, and the one among them that only the template
        writes."""
        self.stop_token_ids = tuple(self.stop_texts)
        self._variants: dict[bytes, Renderer] = {}
        self._probe_template()
        self.tool_format = configured_format or detect_format(self.render)
        """Name of the format of tool calls; empty if the template writes calls in an unknown format."""

    def with_options(self, options: dict[str, Any]) -> Renderer:
        """This renderer with further variables of the template. Variables that the template does not read are
        dropped. Raises TemplateError if the template refuses them."""
        options = {name: value for name, value in options.items() if name in self.templates.variables}
        if not options:
            return self
        options = self.mend(options)
        key = encode_sorted(options)
        variant = self._variants.get(key)
        if variant is None:
            variant = copy(self)
            variant.options = options
            variant._probe_template()
            _cache(self._variants, key, variant)
        return variant

    def is_ready_for(self, options: dict[str, Any]) -> bool:
        """Whether `with_options` has probed the template with these options, which takes a tenth of a
        second."""
        options = {name: value for name, value in options.items() if name in self.templates.variables}
        return not options or encode_sorted(options) in self._variants

    def _probe_template(self) -> None:
        self.opens_thinking = self.thinks and self._opens_thinking()
        """Whether the prompt itself ends with the opening think tag."""
        self._append_only_roles = self._find_append_only_roles()
        self.shows_tools = shows_tools(self.render)
        """Whether a prompt with a tool differs from one without."""

    def _find_append_only_roles(self) -> frozenset[str]:
        is_multimodal = self.image_processor is not None
        key = encode_sorted([self.templates.sources, self._special | self.options, is_multimodal])
        roles = _append_only_roles.get(key)
        if roles is None:
            roles = append_only_roles(self.render)
            if is_multimodal:
                roles &= append_only_roles(with_images(self.render))
            _cache(_append_only_roles, key, roles)
        return roles

    def render(
        self,
        messages: list[Message],
        tools: list[Tool],
        num_first: int | None = None,
        *,
        opens_answer: bool = True,
    ) -> str:
        """See ChatTemplate.render. With `opens_answer` the text ends where an answer begins. Texts are mended
        first."""
        if self.placeholder is not None:
            messages = [self.mend(message) for message in messages]
            tools = [self.mend(tool) for tool in tools]
        variables = self._special | self.options | {"add_generation_prompt": opens_answer}
        return self.templates.of(tools).render(messages, tools, variables, num_first)

    def mend(self, value: Value) -> Value:
        """The JSON value with its texts changed so that they spell no placeholder of images."""
        return value if self.placeholder is None else self.placeholder.mend(value)

    def find_fault(self) -> str | None:
        """Why no policy can be trained with this template, as a clause that follows the name of the folder;
        None if one can."""
        if self.templates.contain(_CHANNEL):
            return (
                f"its chat template writes channels ({_CHANNEL}, as that of gpt-oss), which SeamlessFlow "
                "does not read: reasoning and calls would become text; choose another model"
            )
        eos_token = self._special.get("eos_token")
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        if eos_token is not None and eos_token not in added:
            return (
                f"eos_token {eos_token!r} of tokenizer_config.json is not among the added tokens of "
                "tokenizer.json, so prompts would spell it as ordinary text; save the tokenizer again: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return None

    def describe_rows(self, role: str) -> str:
        """The number of training rows, in words, of a session whose answers are followed by messages of this
        role."""
        if not self.opens_thinking and not keeps_rows(self.render, role, after_reasoning=False):
            return "a row each"
        if not self.thinks or keeps_rows(self.render, role, after_reasoning=True):
            return "one row"
        return "a row each" if self.opens_thinking else "a row each after an answer with reasoning"

    def check_image_placeholders(self, text: str, messages: list[Message]) -> None:
        """Raises TemplateError if a rendering shows other images than those of its messages."""
        if self.placeholder is None:
            return
        num_placeholders = text.count(self.placeholder.text)
        num_images = len(list_image_parts(messages))
        if num_placeholders != num_images:
            raise jinja2.TemplateError(
                f"the rendered prompt shows {num_placeholders} images, but the messages have {num_images}"
            )

    def merge_late_system(self, messages: list[Message]) -> list[Message]:
        """The messages of Anthropic's API. System messages after the first are merged into it, if the
        template refuses them."""
        has_late_system = any(message["role"] == "system" for message in messages[1:])
        if has_late_system and self.templates.refuses_late_system:
            return merge_system(messages, "")
        return messages

    def is_append_only(self, added: list[Message]) -> bool:
        """Whether these messages, added after an answer, leave the rendering of earlier ones unchanged."""
        return {message["role"] for message in added} <= self._append_only_roles

    def disable_append_only(self, added: list[Message]) -> None:
        """Record that the template rewrote earlier messages despite the probes: whole conversations are
        rendered from now on."""
        if self.is_append_only(added):
            self._append_only_roles = frozenset()

    def last_stop(self, text: str, ids: Ids) -> tuple[int, int] | None:
        """Offsets of the last end-of-turn token in a text and in its ids; None if it has none."""
        text_offset = max(text.rfind(stop) for stop in self.stop_texts.values())
        is_stop = np.logical_or.reduce([ids == stop for stop in self.stop_texts])
        id_offsets = np.flatnonzero(is_stop)
        if text_offset < 0 or not len(id_offsets):
            return None
        return text_offset, int(id_offsets[-1])

    def encode(self, text: str, after: str = "", limit: float = inf, *, adds_special: bool = False) -> Ids:
        """Ids of a text that follows the special token `after`: some tokenizers put a space before a text,
        but only at the very beginning. `adds_special`: the tokenizer adds its special tokens. Raises
        TooManyTokensError if a long text has `limit` tokens or more."""
        ids = self._encode(after + text, limit + bool(after), adds_special)
        if after:
            # an end-of-turn text that is no added token may be encoded together with the text
            is_own_token = ids[0] == self._tokenizer.token_to_id(after)
            ids = ids[1:] if is_own_token else self._encode(text, limit)
        return ids

    def _encode(self, text: str, limit: float, adds_special: bool = False) -> Ids:
        if len(text) < LONG_CHARACTERS:
            encoding = self._tokenizer.encode(text, add_special_tokens=adds_special)
            return np.array(encoding.ids, dtype=np.int32)
        # unlike `encode`, it releases the GIL and computes no offsets: half the time and half the memory
        [encoded] = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)
        if len(encoded) >= limit:
            # making the list of ids alone would block other threads
            raise TooManyTokensError(len(encoded))
        return to_ids(encoded.ids)

    def encode_behind_text(self, text: str) -> Ids:
        """Ids of a text that continues another text; see `encode`."""
        return self.encode(text, after=next(iter(self.stop_texts.values())))

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def decoder(self, marks: Iterable[str]) -> Callable[[list[int]], str]:
        """A `decode` that also shows the special tokens in `marks`."""
        if self._skipped.keys().isdisjoint(marks):
            return self.decode
        hidden = {token for text, token in self._skipped.items() if text not in marks}
        return lambda ids: self.decode_with_special([token for token in ids if token not in hidden])

    def decode_with_special(self, ids: list[int]) -> str:
        """Text with special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _opens_thinking(self) -> bool:
        prompt = self.render([{"role": "user", "content": "hi"}], [])
        return prompt.rstrip().endswith(THINK_START)

    def suffix_after_turn(self, rest: str, last_id: int | None) -> str | None:
        """The text after a recorded turn. `rest` is the rendering of that turn and of everything after it.

        The turn's own text in `rest` is never encoded, because its ids are recorded. None if the rendering
        shows no end of the turn."""
        offsets = {token: rest.find(text) for token, text in self.stop_texts.items()}
        stops = [(offset, token) for token, offset in offsets.items() if offset >= 0]
        if not stops:
            return None
        end, token = min(stops)
        if token == last_id:
            end += len(self.stop_texts[token])
        return rest[end:]

    def _read_stops(self, folder: Path) -> tuple[dict[int, str], str | None]:
        configured = _read_json(folder / "generation_config.json").get("eos_token_id")
        ids = set(configured if isinstance(configured, list) else [configured]) - {None}
        if "eos_token" in self._special:
            ids.add(self._tokenizer.token_to_id(self._special["eos_token"]))
        texts = {token: self._tokenizer.id_to_token(token) for token in ids - {None}}
        # the network may have more ids than the tokenizer
        stops = {token: text for token, text in texts.items() if text}
        if not stops:
            raise ValueError(f"{folder}: the tokenizer has no eos_token, so turns could not end")
        added_tokens = self._tokenizer.get_added_tokens_decoder()
        added_ids = {token.content: token_id for token_id, token in added_tokens.items()}
        messages_only = partial(self.render, opens_answer=False)
        template_stop = find_end_of_turn(self.render, messages_only, tuple(stops.values()), added_ids)
        if template_stop is not None:
            stops[added_ids[template_stop]] = template_stop
        return dict(sorted(stops.items())), template_stop


_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


_append_only_roles: dict[bytes, frozenset[str]] = {}
"""Cache of the roles that templates append, by template and variables: runs of one process often have the
same template."""


def _cache(values: dict[bytes, Value], key: bytes, value: Value) -> None:
    """Add a value to a cache; if it is full, the oldest value is removed."""
    # threads do this too (large_requests.py): each step alone is safe
    if len(values) >= MAX_VARIANTS:
        values.pop(next(iter(list(values))), None)
    values[key] = value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = load_json(read_bytes(str(path))) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} cannot be read: it must be a JSON object")
    return value


def _token_text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def open_renderer(model_dir: str) -> Renderer:
    """Raises ValueError with one sentence if the folder cannot be used, OSError if it cannot be read."""
    try:
        return Renderer(model_dir)
    except OSError:
        raise
    except Exception as error:  # a broken tokenizer.json raises a plain Exception
        if type(error) is ValueError:
            raise
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{model_dir}: tokenizer or template is broken: {cause}") from error


async def read_renderer(model_dir: str) -> Renderer:
    """Raises ApiError if the folder cannot be used."""
    try:
        return await asyncio.to_thread(open_renderer, model_dir)
    except (ValueError, OSError) as error:
        raise ApiError(400, str(error), param="model_dir") from error
