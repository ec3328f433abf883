"""What vLLM's own processes load to hold answers to grammars (`--logits-processors`).

vLLM's structured outputs want a tokenizer in the server, and begin anew with what is left of an answer that
new weights interrupted. Imports what vLLM's environment has, and of this project what needs no more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from sf_core.engines.grammar import Following, Vocabularies, forbidden


class GrammarProcessor(LogitsProcessor):
    """Of requests whose `extra_args` have a `grammar`, only tokens that it allows are sampled. The last
    `num_sampled` ids of the prompt belong to the answer."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._vocabularies = Vocabularies(Path(vllm_config.model_config.model, "tokenizer.json").read_bytes)
        self._device = device
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._rows:
            rows = list(self._rows)
            answers = [row.caught_up() for row in self._rows.values()]
            mask = torch.from_numpy(forbidden(answers, logits.shape[1])).to(self._device)
            logits[rows] = logits[rows].masked_fill(mask, -torch.inf)
        return logits

    def _row(self, params: SamplingParams, prompt: list[int] | None, sampled: list[int]) -> _Row | None:
        given = params.extra_args or {}
        if not (grammar := given.get("grammar")):
            return None
        # the prompt has what was sampled of the answer before
        before = prompt[len(prompt) - given["num_sampled"] :] if prompt else []
        return _Row(Following(self._vocabularies.of(params.stop_token_ids or ()), grammar, before), sampled)


class _Row:
    """A request of the batch. `sampled` is vLLM's own list, which grows."""

    def __init__(self, following: Following, sampled: list[int]) -> None:
        self._following, self._sampled = following, sampled
        self._num_taken = 0

    def caught_up(self) -> Following:
        self._following.take(self._sampled[self._num_taken :])
        self._num_taken = len(self._sampled)
        return self._following
