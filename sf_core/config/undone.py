"""The fields of agents' requests that would change an answer and are not done, one list for all dialects.

A request that has one of them is refused, unless its value changes nothing or the run lets the field pass
(`rollout.ignored_fields`). What depends on other fields, or stands deeper in a request, its dialect refuses.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import AfterValidator

from sf_core.config.words import shown

UNDONE: dict[str, tuple[Any, ...]] = {
    # what may be sampled
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
    # what form the answer has
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
    # what the policy is shown
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "truncate_prompt_tokens": (),
    "documents": ([],),
    "conversation": (),
    "context_management": (),
    # what else would be done for the answer
    "background": (False,),
    "functions": ([],),
    "mcp_servers": ([],),
    "web_search_options": (),
}
"""By name: the values that change nothing, beside null."""


def _is_undone(name: str) -> str:
    if name not in UNDONE:
        near = " or ".join(get_close_matches(name, UNDONE)) or "presence_penalty"
        raise ValueError(f"{shown(name)} is none of the fields that are refused, as {near} is")
    return name


UndoneField = Annotated[str, AfterValidator(_is_undone)]
"""The name of one of them."""
