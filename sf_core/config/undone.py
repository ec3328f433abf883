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

UNDONE: dict[str, tuple[Any, ...]] = {
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
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    # form of the answer
    "response_format": ({"type": "text"},),
    "text.format": ({"type": "text"},),
    "output_format": (),
    "output_config.format": (),
    "structured_outputs": ({},),
    "structural_tag": (),
    "guided_json": (),
    "guided_json_object": (False,),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "response_mime_type": ("text/plain",),
    "response_schema": (),
    "response_json_schema": (),
    "response_modalities": (["TEXT"],),
    "speech_config": (),
    "image_config": (),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    # rendering of the prompt
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "truncate_prompt_tokens": (),
    "documents": ([],),
    "conversation": (),
    "cached_content": (),
    "continuation_token": (),
    "context_management": ([], {}, {"edits": []}, KEEP_THINKING),
    "compaction": (),
    # other work for the answer
    "background": (False,),
    "container": (),
    "functions": ([],),
    "mcp_servers": ([],),
    "web_search_options": (),
}
"""Unsupported fields by name, each with the values that change nothing. null also changes nothing. A name
with a dot is the name of a field inside another field."""


DONE_SINCE = {"chat_template_kwargs"}
"""Fields that earlier versions refused. A run may still list these fields in `rollout.ignored_fields`."""


def _is_undone(name: str) -> str:
    if name not in UNDONE and name not in DONE_SINCE:
        near = " or ".join(get_close_matches(name, UNDONE)) or "presence_penalty"
        raise ValueError(f"{quote(name)} is not a field that can be ignored; use for example {near}")
    return name


Normalisation = Literal["billing_header"]
"""Name of a text that is removed from requests (dataplane/gateway/dialects/normalised.py)."""

UndoneField = Annotated[str, AfterValidator(_is_undone)]
"""Name of an unsupported request field."""
