"""Engines that a token of a request ends, and workers whose processes such engines end."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Literal

from sf_core.dataplane.operator_key import operator_key
from sf_core.engines.drivers.serve import serve_engine
from sf_core.engines.protocol import Engine
from sf_core.engines.scripted import Script, ScriptedEngine
from sf_core.engines.wire import Hello
from sf_core.types import Chunk, GenerationRequest
from tests.bench.engines.self_running import SelfRunningEngine
from tests.bench.waits import join, patience

FATAL = 77
"""Exit code of a process that such a token has ended."""

Kind = Literal["scripted", "self-running", "torch"]


class FatalEngine(ScriptedEngine):
    """An engine that calls `end` in a step in which a request has the token `fatal`; the token `bad` ends its
    own request alone."""

    def __init__(
        self, script: Script, end: Callable[[], object], fatal: int, bad: int | None = None, **options: Any
    ) -> None:
        super().__init__(script, **options)
        self.end = end
        self.fatal = fatal
        self.bad = bad
        self.known: dict[str, list[int]] = {}
        """Tokens of each request that it was given or has reported."""
        self.seeds: list[int] = []
        """Seeds of all requests that it was given."""

    def submit(self, request: GenerationRequest) -> None:
        super().submit(request)
        self.seeds.append(request.sampling.seed)
        self.known[request.request_id] = list(request.prompt_ids)

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        return self._forget(super().abort(request_ids))

    def step(self) -> list[Chunk]:
        if any(self.fatal in ids for ids in self.known.values()):
            self.end()
        bad = [name for name, ids in self.known.items() if self.bad in ids]
        failed = [Chunk.failed(chunk.request_id, chunk.version, "a bad row") for chunk in self.abort(bad)]
        chunks = super().step()
        for chunk in chunks:
            self.known[chunk.request_id] += chunk.token_ids
        return [*failed, *self._forget(chunks)]

    def rest(self) -> None:
        super().rest()
        self.known.clear()

    def _forget(self, chunks: list[Chunk]) -> list[Chunk]:
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self.known.pop(chunk.request_id, None)
        return chunks


def fail() -> None:
    raise RuntimeError("the forward pass failed")


def make_forward_fatal(fatal: int, end: Callable[[], object], set_attribute: Any = setattr) -> None:
    """Have the forward pass of built-in policies call `end` if it gets this token, which they never
    sample."""
    import torch

    from sf_core.engines.torch.cached_model import DecoderModel

    prefill = DecoderModel.prefill
    next_logits = DecoderModel.next_logits

    def fatal_prefill(self: DecoderModel, cache: Any, ids: torch.Tensor, *places: Any) -> None:
        if (ids == fatal).any():
            end()
        prefill(self, cache, ids, *places)

    def fatal_logits(self: DecoderModel, cache: Any, ids: torch.Tensor, *places: Any) -> torch.Tensor:
        if (ids == fatal).any():
            end()
        logits = next_logits(self, cache, ids, *places)
        logits[:, fatal] = -torch.inf
        return logits

    set_attribute(DecoderModel, "prefill", fatal_prefill)
    set_attribute(DecoderModel, "next_logits", fatal_logits)


def _make(kind: Kind, folder: str, answer: list[int], fatal: int, max_running: int) -> Engine:
    end = functools.partial(os._exit, FATAL)
    if kind == "torch":
        import torch

        from sf_core.engines.torch.torch_engine import TorchEngine

        torch.set_num_threads(1)
        make_forward_fatal(fatal, end)
        return TorchEngine(folder, max_running=max_running, context_length=64)
    engine = FatalEngine(lambda prompt, seed: answer, end, fatal, max_running=max_running)
    return engine if kind == "scripted" else SelfRunningEngine(engine)


def _serve(url: str, hello: Hello, *made_of: Any) -> None:
    with suppress(ConnectionError):
        engine = _make(*made_of, hello.max_running)
        serve_engine(url, operator_key(url), hello, engine, patience_s=patience())


class FatalWorker:
    """A worker whose lease begins again in a new process, with a higher epoch, whenever a token has ended
    the process before."""

    def __init__(
        self, url: str, lease: str, kind: Kind, folder: str, answer: list[int], fatal: int, max_running: int
    ) -> None:
        self._hello = functools.partial(Hello, "run", 1, lease)
        self._arguments = url, lease, max_running, (kind, folder, answer, fatal)
        self.num_ended = 0
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["sf_core.engines.torch.torch_engine", __name__])
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self._thread.start()

    def _hold(self) -> None:
        url, lease, max_running, made_of = self._arguments
        epoch = 0
        code = FATAL
        while code == FATAL:
            hello = self._hello(epoch, lease, lease, max_running)
            process = self._processes.Process(target=_serve, args=(url, hello, *made_of), daemon=True)
            process.start()
            process.join()
            code = process.exitcode
            epoch = epoch + 1
            self.num_ended += code == FATAL

    def close(self) -> None:
        """Wait for its end, after its run was released."""
        join(self._thread)
