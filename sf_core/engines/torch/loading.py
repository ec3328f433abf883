"""The models of new weights, made in a thread of its own while the engine serves on the old ones. If the
weights are those of an adapter, the model is made once, and each version brings other factors for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import torch

from sf_core.engines.host_weights import HostWeights
from sf_core.engines.torch.adapters import Factors, read_factors
from sf_core.engines.torch.cached_model import CachedModel, open_model
from sf_core.engines.torch.params import CopiedParams, read_params
from sf_core.models.adapter import AdapterVersions
from sf_core.types import WeightsRef
from storage.files import local_folder
from storage.tensors.weights import WEIGHT_FILES

_COPY_FACTOR = 1.5
"""Memory of a model and of making it over that of its parameters: a tied head is a tensor of its own."""

Make = Callable[[], CachedModel]


@dataclass(frozen=True, slots=True)
class Arrival:
    version: int
    make: Make | None
    """Returns the model: at once if there was room to make it beside the old one. None: that one stays."""
    factors: Factors | None = None
    """What the model is to add to its weights."""


class _CancelledError(Exception):
    pass


class Loader:
    """Fetches weights and makes models of them. Those that were asked for last count."""

    def __init__(
        self,
        model_dir: str,
        adapter_dir: str | None,
        *,
        context_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`adapter_dir`: folder of the adapter whose versions are the weights. None: they are the model's."""
        self._model_dir = model_dir
        self._context_length = context_length
        self._dtype = dtype
        self._device = device
        self._adapters = None if adapter_dir is None else AdapterVersions(adapter_dir)
        self._host = HostWeights()
        # a new thread would not take over how many threads compute
        self._thread = ThreadPoolExecutor(
            1, "sf-weights", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self._cancelled = threading.Event()
        self._coming: Future[Arrival] | None = None

    def begin(self, weights: WeightsRef, held: CachedModel | None) -> None:
        """Begin to make a model of these weights, to replace the one that is held."""
        self.cancel()
        self._cancelled = threading.Event()
        # not the model itself: its memory must be free when the engine lets go of it
        like = None if held is None else (held.params_shapes, held.remake)
        self._coming = self._thread.submit(self._prepare, weights, like, self._cancelled)

    def arrival(self) -> Arrival | None:
        """What was begun last, once it is there. Raises, once, what made it fail."""
        if self._coming is None or not self._coming.done():
            return None
        coming = self._coming
        self._coming = None
        return coming.result()

    def cancel(self) -> None:
        """Forget what was begun. Its memory is free as soon as the tensor that is on its way is there."""
        self._cancelled.set()
        self._coming = None

    def close(self) -> None:
        self.cancel()
        self._thread.submit(self._host.close)
        self._thread.shutdown(wait=False)

    @torch.inference_mode()
    def _prepare(
        self,
        weights: WeightsRef,
        like: tuple[dict[str, torch.Size], Callable[[CopiedParams], CachedModel]] | None,
        cancelled: threading.Event,
    ) -> Arrival:
        def check() -> None:
            if cancelled.is_set():
                raise _CancelledError

        check()
        factors = None
        whole = weights
        if self._adapters is not None:
            factors = read_factors(self._adapters, weights.uri, self._dtype, self._device)
            if like is not None:
                return Arrival(weights.version, None, factors)
            whole = WeightsRef(0, self._model_dir)
        check()
        folder = self._host.fetch(whole)
        check()
        if like is None:
            model = open_model(
                local_folder(self._model_dir, exclude=WEIGHT_FILES),
                folder,
                context_length=self._context_length,
                dtype=self._dtype,
                device=self._device,
                check=check,
            )
            return Arrival(weights.version, lambda: model, factors)
        shapes, remake = like
        params = read_params(folder, shapes, dtype=self._dtype, device=self._device, check=check)
        num_bytes = sum(shape.numel() for shape in shapes.values()) * self._dtype.itemsize
        if free_memory(self._device) < _COPY_FACTOR * num_bytes:
            return Arrival(weights.version, lambda: remake(params))
        model = remake(params)
        return Arrival(weights.version, lambda: model)


def free_memory(device: torch.device) -> int:
    """Memory that this process can still allocate on the device, in bytes."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
