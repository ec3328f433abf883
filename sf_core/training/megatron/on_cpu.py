"""Megatron-core on the CPU, for tests and for machines without a GPU.

Megatron asks for CUDA by name, where any device would do. Within `cuda_means_cpu`
- tensors that are to be made on "cuda" are made on the CPU, and `Tensor.cuda()` leaves them there;
- `Tensor.type()` answers as for a tensor on CUDA, by which Megatron's optimizers tell dtypes;
- `torch.cuda` names the CPU as its current device, and has nothing to wait for or to free;
- nothing is kept of CUDA's random numbers, of which a layer that is computed again draws none anyway.

What is computed, and in which order ranks exchange it, is Megatron's own code. Where the device is a GPU,
nothing of this is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode


@contextmanager
def cuda_means_cpu() -> Iterator[None]:
    own = [(module, name, getattr(module, name)) for module, name, _ in _STAND_INS]
    for module, name, stand_in in _STAND_INS:
        setattr(module, name, stand_in)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for module, name, function in own:
            setattr(module, name, function)


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if (device := kwargs.get("device")) is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.")
        return result


def _nothing(*_: Any, **__: Any) -> None:
    return None


_STAND_INS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    (torch.cuda, "synchronize", _nothing),
    (torch.cuda, "empty_cache", _nothing),
    (random, "_get_cuda_rng_state", _nothing),
    (random, "_set_cuda_rng_state", _nothing),
)
