"""The OpenAI Completions dialect: continues texts or token ids as they are, without a chat template."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from sf_core.dataplane.errors import WrongField
from sf_core.dataplane.gateway.dialects.checks import (
    Body,
    get_field,
    parse_stop,
    positive_int,
    read_sampling,
    refuse_unless,
)
from sf_core.dataplane.gateway.dialects.openai import OVERFLOW, ChoicesReply, OpenAI
from sf_core.dataplane.gateway.dialects.protocol import MAX_TURNS
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.answer import Answer, Pieces, TokenLogprob
from sf_core.dataplane.turns.request import TurnRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


class Completions(OpenAI):
    name = "completions"
    paths: tuple[str, ...] = ("/v1/completions",)
    overflow = OVERFLOW, "prompt"
    done_fields = frozenset({"add_special_tokens"})
    has_ids = True

    def parse(self, body: Body, session: Session, is_multimodal: bool = False) -> list[TurnRequest]:
        num_samples = positive_int(body, "n", MAX_TURNS) or 1
        refuse_unless(body, "best_of", "best_of must equal n", num_samples)
        logprobs = get_field(body, "logprobs", (int,), None)
        if logprobs:
            raise WrongField(
                "logprobs", "logprobs must be 0, which returns the log-prob of the sampled token"
            )
        prompts = _parse_prompts(body.get("prompt"))
        if len(prompts) * num_samples > MAX_TURNS:
            raise WrongField("prompt", f"the number of prompts times n must be at most {MAX_TURNS}")
        get_field(body, "stream_options", (dict,), {})
        refuse_unless(body, "chat_template_kwargs", "chat_template_kwargs has no effect without messages", {})
        return [
            TurnRequest(
                text_or_ids=prompt,
                adds_special=get_field(body, "add_special_tokens", (bool,), True),
                stop=parse_stop(body),
                max_tokens=positive_int(body, "max_tokens") or DEFAULT_MAX_TOKENS,
                sampling=read_sampling(body),
                seed=get_field(body, "seed", (int,), None),
                num_samples=num_samples,
                stream=get_field(body, "stream", (bool,), False),
                logprobs=logprobs is not None,
            )
            for prompt in prompts
        ]

    def reply(self, body: Body, turn_id: str, session: Session) -> CompletionsReply:
        return CompletionsReply(f"cmpl-{turn_id}", body)


class CompletionsReply(ChoicesReply):
    chunk_kind = "text_completion"

    def __init__(self, reply_id: str, body: Body) -> None:
        super().__init__(reply_id, body)
        self._num_characters: dict[int, int] = {}
        """Number of characters, per choice, of the tokens whose log-probs were sent."""

    def whole(self, answers: list[Answer]) -> bytes:
        choices = [
            self._choice(i, answer.content, answer.finish_reason, answer.logprobs)
            for i, answer in enumerate(answers)
        ]
        body = {"object": self.chunk_kind, "choices": choices, "usage": self._usage(answers)}
        return msgspec.json.encode(self._head | body)

    def start(self, num_prompt_tokens: int) -> bytes:
        return b""

    def piece(self, index: int, pieces: Pieces) -> bytes:
        text = "".join(event for event in pieces.events if isinstance(event, str))
        if not text and not pieces.logprobs:
            return b""
        return self._chunk([self._choice(index, text, None, pieces.logprobs)])

    def end_turn(self, index: int, answer: Answer) -> bytes:
        return self._chunk([self._choice(index, "", answer.finish_reason, None)])

    def _choice(
        self, index: int, text: str, finish_reason: str | None, logprobs: list[TokenLogprob] | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "finish_reason": finish_reason,
            "logprobs": None if logprobs is None else self._logprobs(index, logprobs),
        }

    def _logprobs(self, index: int, entries: list[TokenLogprob]) -> dict[str, Any]:
        lengths = [len(entry.text) for entry in entries]
        *offsets, self._num_characters[index] = itertools.accumulate(
            lengths, initial=self._num_characters.get(index, 0)
        )
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _parse_prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or _is_ids(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise WrongField(
            "prompt", "prompt must be a text, a list of texts, a list of token ids or a list of such lists"
        )
    for i, text_or_ids in enumerate(prompt):
        is_text = isinstance(text_or_ids, str) and bool(text_or_ids)
        if not is_text and not _is_ids(text_or_ids):
            raise WrongField("prompt", f"prompt[{i}] must be a non-empty text or a list of token ids")
    return prompt


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
