"""What computations take in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes of tensors, those inside of operators included, that were there at a time, over those that
    were there before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))
