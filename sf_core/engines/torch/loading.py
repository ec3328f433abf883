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
from sf_core.engines.torch.cached_model import CachedModel, open_model
from sf_core.engines.torch.params import CopiedParams, Factors, read_factors, read_params
from sf_core.models.adapter import AdapterVersions
from sf_core.types import WeightsRef
from storage.files import local_folder
from storage.tensors.weights import WEIGHT_FILES

_MODEL_MEMORY_FACTOR = 1.5
"""Memory that making a model takes, per byte of its parameters: a tied head becomes a tensor of its own."""

Make = Callable[[], CachedModel]


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights of a version that are ready to take the place of the current ones."""

    version: int
    make: Make | None
    """Returns the new model, which is made already if there was room for it beside the old one. None: the old
    model stays."""
    factors: Factors | None = None
    """The factors of the adapter that the model adds to its weights."""


class _CancelledError(Exception):
    pass


class Loader:
    """Fetches weights and makes models of them. New weights replace those that are still being loaded."""

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
        self._host_weights = HostWeights()
        # torch's number of threads is set per thread, and a new thread does not inherit it
        self._executor = ThreadPoolExecutor(
            1, "sf-weights", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self._cancelled = threading.Event()
        self._pending: Future[LoadedWeights] | None = None

    def begin(self, weights: WeightsRef, current: CachedModel | None) -> None:
        """Begin to make a model of these weights, to replace the current one."""
        self.cancel()
        self._cancelled = threading.Event()
        # without a reference to the model, whose memory must be free once the engine drops the model
        template = None if current is None else (current.params_shapes, current.remake)
        self._pending = self._executor.submit(self._prepare, weights, template, self._cancelled)

    def poll(self) -> LoadedWeights | None:
        """The weights that were begun last, once they are loaded. Raises, once, the error of loading them."""
        if self._pending is None or not self._pending.done():
            return None
        pending = self._pending
        self._pending = None
        return pending.result()

    def cancel(self) -> None:
        """Give up the weights that were begun. Their memory is free as soon as the current tensor is read."""
        self._cancelled.set()
        self._pending = None

    def close(self) -> None:
        self.cancel()
        self._executor.submit(self._host_weights.close)
        self._executor.shutdown(wait=False)

    @torch.inference_mode()
    def _prepare(
        self,
        weights: WeightsRef,
        template: tuple[dict[str, torch.Size], Callable[[CopiedParams], CachedModel]] | None,
        cancelled: threading.Event,
    ) -> LoadedWeights:
        def check() -> None:
            if cancelled.is_set():
                raise _CancelledError

        check()
        factors = None
        full_weights = weights
        if self._adapters is not None:
            factors = read_factors(self._adapters, weights.uri, self._dtype, self._device)
            if template is not None:
                return LoadedWeights(weights.version, None, factors)
            full_weights = WeightsRef(0, self._model_dir)
        check()
        folder = self._host_weights.fetch(full_weights)
        check()
        if template is None:
            model = open_model(
                local_folder(self._model_dir, exclude=WEIGHT_FILES),
                folder,
                context_length=self._context_length,
                dtype=self._dtype,
                device=self._device,
                check=check,
            )
            return LoadedWeights(weights.version, lambda: model, factors)
        shapes, remake = template
        params = read_params(folder, shapes, dtype=self._dtype, device=self._device, check=check)
        num_bytes = sum(shape.numel() for shape in shapes.values()) * self._dtype.itemsize
        if free_memory(self._device) < _MODEL_MEMORY_FACTOR * num_bytes:
            return LoadedWeights(weights.version, lambda: remake(params))
        model = remake(params)
        return LoadedWeights(weights.version, lambda: model)


def free_memory(device: torch.device) -> int:
    """Memory that this process can still allocate on the device, in bytes."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
