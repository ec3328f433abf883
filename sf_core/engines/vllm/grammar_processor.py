"""What vLLM's own processes load to hold answers to grammars (`--logits-processors`).

vLLM's structured outputs want a tokenizer in the server, and begin anew with what is left of an answer that
new weights interrupted. Imports what vLLM's environment has, and of this project what needs no more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as RowProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

from sf_core.engines.grammar import GrammarState, Vocabularies
from sf_core.engines.masking import mask_forbidden

log = logging.getLogger(__name__)


class GrammarProcessor(RowProcessor, SlotProcessor):
    """Of requests whose `extra_args` have a `grammar`, only tokens that it allows are sampled. The last
    `num_sampled` ids of the prompt belong to the answer.

    One class for both of vLLM's model runners, of which the server chooses one: the first, on the CPU, tells
    what changes in the rows of the batch; the second, on CUDA, gives every request a slot.
    """

    def __init__(self, vllm_config: Any, *of_runner: Any) -> None:
        self._vocabularies = Vocabularies(Path(vllm_config.model_config.model, "tokenizer.json").read_bytes)
        self._request_states = of_runner[0]
        """The tokens of all slots, on CUDA; on the CPU it is the device, and is not used."""
        self._rows: dict[int, _Answer] = {}
        self._slots: dict[int, _Answer] = {}
        """The answer of the last request of each slot: vLLM does not report when a request ends."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._start_row)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._slots.pop(req_idx, None)
        if (state := self._start_grammar(sampling_params)) is None:
            return False
        start = int(self._request_states.prompt_len.np[req_idx]) - sampling_params.extra_args["num_sampled"]
        self._slots[req_idx] = _Answer(state, start, [])
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        if ctx is None:
            for answer in self._rows.values():
                answer.read()
            return _mask_rows(logits, self._rows)
        if self._slots.keys().isdisjoint(ctx.idx_mapping_np.tolist()):
            return logits
        slots = ctx.expanded_idx_mapping.tolist()
        positions = ctx.pos.tolist()
        rows = {}
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            if slot in self._slots and position + 1 >= self._request_states.prompt_len.np[slot]:
                rows[row] = answer = self._slots[slot]
                answer.ids += self._request_states.all_token_ids.gpu[slot, answer.end : position + 1].tolist()
                answer.read()
        return _mask_rows(logits, rows)

    def _start_row(
        self, params: SamplingParams, prompt: list[int] | None, sampled: list[int]
    ) -> _Answer | None:
        if (state := self._start_grammar(params)) is None:
            return None
        # `sampled` is vLLM's own list, which grows
        ids = prompt or []
        num_before = params.extra_args["num_sampled"]
        state.advance(ids[len(ids) - num_before :])
        return _Answer(state, 0, sampled)

    def _start_grammar(self, params: SamplingParams) -> GrammarState | None:
        if not (grammar := (params.extra_args or {}).get("grammar")):
            return None
        vocabulary = self._vocabularies.of(params.stop_token_ids or ())
        try:
            return GrammarState(vocabulary, grammar, ())
        except ValueError as error:
            # our engine has accepted the grammar, so vLLM has another llguidance. An error ends the server
            log.error("%s", error)
            return GrammarState(vocabulary, 'start: ""', ())


@dataclass(slots=True)
class _Answer:
    state: GrammarState
    start: int
    """Position of the first of `ids` among all tokens of the request."""
    ids: list[int]
    """Ids of the answer so far; the first `num_read` of them have advanced the grammar."""
    num_read: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def read(self) -> None:
        self.state.advance(self.ids[self.num_read :])
        self.num_read = len(self.ids)


def _mask_rows(logits: torch.Tensor, answers: dict[int, _Answer]) -> torch.Tensor:
    """The logits, in which these rows are held to their grammars."""
    if answers:
        rows = sorted(answers)
        mask_forbidden(logits, rows, [answers[row].state for row in rows])
    return logits
