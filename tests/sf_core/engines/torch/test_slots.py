from __future__ import annotations

import numpy as np

from sf_core.engines.torch.slots import SlotTable
from sf_core.types import FinishReason, GenerationRequest, Sampling


def test_a_request_that_moves_to_another_slot_keeps_what_was_sampled_for_it() -> None:
    table = SlotTable(num_slots=2, context_length=8)
    for slot, name in enumerate("ab"):
        table.occupy(slot, GenerationRequest(name, [5 + slot], 0, 4, (), Sampling(seed=slot)), 0)
    both = np.array([0, 1])
    first = np.array([0])
    table.append(both, np.array([10, 20]), np.array([-1.0, -2.0], np.float32), version=3)
    table.append(both, np.array([11, 21]), np.array([-1.5, -2.5], np.float32), version=3)
    ended = table.end(0, FinishReason.STOP)
    assert (ended.request_id, ended.token_ids, ended.logprobs) == ("a", [10, 11], [-1.0, -1.5])
    table.swap(*table.holes())
    assert table.running["seed"].tolist() == [1]
    table.append(first, np.array([22]), np.array([-0.25], np.float32), version=3)
    moved = table.end(0, FinishReason.STOP)
    assert (moved.request_id, moved.token_ids) == ("b", [20, 21, 22])
    assert (moved.logprobs, moved.version) == ([-2.0, -2.5, -0.25], 3)
