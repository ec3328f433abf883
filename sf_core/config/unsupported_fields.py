"""The request fields that would change an answer but are not supported, in one list for all API dialects.

A request with one of them is refused, unless its value changes nothing, the run ignores the field
(`rollout.ignored_fields`), or it is the dialect's own for a schema (`Dialect.schema_fields`) and the run's
engines follow schemas. Fields that depend on others are refused by each dialect.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from sf_core.settings import quote

KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""Value that Claude Code sends, and that clears nothing."""

ALWAYS_REFUSED: tuple[Any, ...] = ()
"""No value of the field leaves the answer as it is."""

UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    # constraints on sampling
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "allowed_token_ids": ALWAYS_REFUSED,
    "bad_words": ([],),
    "use_beam_search": (False,),
    # form of the answer
    "response_format": ({"type": "text"},),
    "text.format": ({"type": "text"},),
    "output_format": ALWAYS_REFUSED,
    "output_config.format": ALWAYS_REFUSED,
    "structured_outputs": ({},),
    "structural_tag": ALWAYS_REFUSED,
    "guided_json": ALWAYS_REFUSED,
    "guided_json_object": (False,),
    "guided_regex": ALWAYS_REFUSED,
    "guided_choice": ALWAYS_REFUSED,
    "guided_grammar": ALWAYS_REFUSED,
    "json_schema": ALWAYS_REFUSED,
    "regex": ALWAYS_REFUSED,
    "ebnf": ALWAYS_REFUSED,
    "grammar": ALWAYS_REFUSED,
    "modalities": (["text"],),
    "audio": ALWAYS_REFUSED,
    "response_mime_type": ("text/plain",),
    "response_schema": ALWAYS_REFUSED,
    "response_json_schema": ALWAYS_REFUSED,
    "response_modalities": (["TEXT"],),
    "speech_config": ALWAYS_REFUSED,
    "image_config": ALWAYS_REFUSED,
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "prompt_logprobs": ALWAYS_REFUSED,
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    # rendering of the prompt
    "chat_template": ALWAYS_REFUSED,
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "truncate_prompt_tokens": ALWAYS_REFUSED,
    "documents": ([],),
    "conversation": ALWAYS_REFUSED,
    "cached_content": ALWAYS_REFUSED,
    "continuation_token": ALWAYS_REFUSED,
    "context_management": ([], {}, {"edits": []}, KEEP_THINKING),
    "compaction": ALWAYS_REFUSED,
    # other work for the answer
    "background": (False,),
    "container": ALWAYS_REFUSED,
    "functions": ([],),
    "mcp_servers": ([],),
    "web_search_options": ALWAYS_REFUSED,
}
"""Unsupported fields by name, each with the values that change nothing. null also changes nothing. A name
with a dot is the name of a field inside another field."""


SUPPORTED_SINCE = {"chat_template_kwargs"}
"""Fields that earlier versions refused. A run may still list these fields in `rollout.ignored_fields`."""


def _check_unsupported_field(name: str) -> str:
    if name not in UNSUPPORTED_FIELDS and name not in SUPPORTED_SINCE:
        near = " or ".join(get_close_matches(name, UNSUPPORTED_FIELDS)) or "presence_penalty"
        raise ValueError(f"{quote(name)} is not a field that can be ignored; use for example {near}")
    return name


Normalisation = Literal["billing_header"]
"""Name of a text that is removed from requests (dataplane/gateway/normalisation.py)."""

UnsupportedField = Annotated[str, AfterValidator(_check_unsupported_field)]
"""Name of an unsupported request field."""
