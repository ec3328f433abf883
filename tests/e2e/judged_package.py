"""A policy in the place of one that can write: a script that asks for the favour, politely or not."""

from __future__ import annotations

import re

from sf_core.models.builtin import make_tokenizer

TOKENIZER = make_tokenizer()


def script(prompt_ids: list[int], seed: int) -> list[int]:
    asked = re.search(r" to ([a-z ]+)\.", TOKENIZER.decode(prompt_ids))
    assert asked is not None
    text = f"Could you please {asked[1]}?" if seed % 2 else f"I say {asked[1]} now."
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids
