"""What rank 0 stores of a version for engines: the weights, and what changed since the version before. It is
stored beside the train step, in a thread that does one piece of work after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import copy_context

import torch

from sf_core.config.run_config import DtypeName
from storage.files import FileRef, is_local
from storage.tensors.shared_memory import share
from storage.tensors.tensor_bytes import TensorBytes
from storage.tensors.weight_delta import open_base, save_delta
from storage.tensors.weights import DIGEST, pack_weights, save_adapter, save_tensors, save_weights


class Background:
    def __init__(self) -> None:
        self._last: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Begin work, in the context of this call, when the work before is done; raises its error."""
        self.wait()
        self._last = done = Future[None]()
        context = copy_context()

        def run() -> None:
            try:
                context.run(work)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        # a process that is to end does not wait for it
        threading.Thread(target=run, name="background", daemon=True).start()

    def wait(self) -> None:
        """Return when nothing is going on; raises the error of what was, once."""
        last = self._last
        self._last = None
        if last is not None:
            last.result()


class Publisher:
    """Where storage is remote, it keeps the version stored last in shared memory: the next one is compared
    with it, and engines on this host read it there."""

    def __init__(self, dtype: DtypeName, adapter: bytes = b"") -> None:
        """`adapter`: the content of `adapter_config.json`, if the weights are an adapter's."""
        self.dtype = dtype
        self._adapter = adapter
        self._last: tuple[int, TensorBytes] | None = None

    def save(
        self, folder: str, weights: Mapping[str, torch.Tensor], version: int, before: str
    ) -> list[FileRef]:
        """Store the weights in this dtype; returns their files, and that of the delta if there is one."""
        if self._adapter:
            return save_adapter(folder, weights, self._adapter, version, self.dtype)
        # a step changes nearly every element of float32
        if self.dtype == "float32":
            return save_weights(folder, weights, version)
        packed = pack_weights(weights, version, self.dtype)
        refs = save_tensors(folder, packed)
        delta = save_delta(folder, self._find_kept(version - 1) or open_base(before, packed), packed, version)
        # before another copy is made
        self._last = None
        if not is_local(folder):
            self._last = version, share(packed, packed.header.metadata[DIGEST])
        return [*refs, delta] if delta else refs

    def _find_kept(self, version: int) -> TensorBytes | None:
        return self._last[1] if self._last is not None and self._last[0] == version else None
