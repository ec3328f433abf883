"""The request fields that would change an answer but are not supported, in one list for all API dialects.

A request with one of them is refused, unless its value changes nothing or the run ignores the field
(`rollout.ignored_fields`). Nested fields, and those that depend on others, are refused by each dialect.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import AfterValidator

from sf_core.config.words import shown

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
    "output_format": (),
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
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    # rendering of the prompt
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "truncate_prompt_tokens": (),
    "documents": ([],),
    "conversation": (),
    "context_management": (),
    # other work for the answer
    "background": (False,),
    "functions": ([],),
    "mcp_servers": ([],),
    "web_search_options": (),
}
"""The values that change nothing, besides null, by name of the field."""


def _is_undone(name: str) -> str:
    if name not in UNDONE:
        near = " or ".join(get_close_matches(name, UNDONE)) or "presence_penalty"
        raise ValueError(f"{shown(name)} is none of the fields that are refused, as {near} is")
    return name


UndoneField = Annotated[str, AfterValidator(_is_undone)]
"""Name of an unsupported request field."""
