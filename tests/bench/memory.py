"""What computations take in memory."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes of tensors, those inside of operators included, that were there at a time, over those that
    were there before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


class Memory(TorchDispatchMode):
    """The bytes of the storages of all tensors that operators return within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._storages = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            # an operation that is made of others allocates what they do
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of this tensor until it is freed; a storage is counted once."""
        storage = tensor.untyped_storage()
        if storage not in self._storages:
            self._storages.add(storage)
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, num_bytes: int) -> None:
        self.held -= num_bytes
