"""What an engine did during a lease, as spans of time: it sampled, took weights, yielded, or waited."""

from __future__ import annotations

import time
from typing import Literal, Protocol

BUSY_GAP_S = 0.05
"""Work that is closer together than this is recorded as one span."""

MAX_SPAN_S = 5.0
"""A span of work is recorded after so long, even if the work goes on."""


Work = Literal["busy", "moving", "wait"]


class Recorder(Protocol):
    """Records what the engine did; sf_core.scheduling.timeline has one."""

    def add(
        self, kind: Work, label: str, start: float, end: float, *, version: int | None = None, tokens: int = 0
    ) -> None:
        """Times in Unix seconds."""

    def flush(self) -> None:
        """Called when the engine has just taken new weights, a good moment to write."""


class NoRecorder:
    def add(self, *span: object, **facts: object) -> None: ...

    def flush(self) -> None: ...


class Spans:
    """Merges work that follows closely into one span. The first span of work ends with the first token."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.aborted_at: float | None = None
        """Unix time at which all requests were aborted, as the data plane does before it takes the device."""
        self.loading_since: float | None = None
        """Unix time since which the engine has nothing to do but to fetch weights."""
        self._span: tuple[float, float] | None = None
        self._version = 0
        self._tokens = 0
        self._has_sampled = False

    def add_work(self, start: float, end: float, version: int, tokens: int) -> None:
        if self._span is None or not self._continues_span(start, version):
            self.end_work()
            self._span = (start, end)
            self._version = version
        self._span = (self._span[0], end)
        self._tokens += tokens
        if tokens and not self._has_sampled:
            self._has_sampled = True
            self.end_work()

    def add_late_tokens(self, tokens: int, version: int) -> None:
        """Add tokens of earlier work that were reported only when their requests were aborted."""
        if tokens:
            now = time.time()
            self.add_work(now, now, version, tokens)

    def end_work(self) -> None:
        if self._span is not None:
            self.recorder.add("busy", "sample", *self._span, version=self._version, tokens=self._tokens)
        self._span = None
        self._tokens = 0

    def record_load(self, is_idle: bool) -> None:
        """Weights are being fetched. Only an idle engine spends time of its own on that."""
        if not is_idle:
            self.loading_since = None
        elif self.loading_since is None:
            self.end_work()
            self.loading_since = time.time()

    def end_load(self, before: int | None, version: int, started: float) -> None:
        """The engine, which had version `before`, has `version` since work that began at `started`."""
        self.end_work()
        since = self.loading_since or started
        self.loading_since = None
        self.recorder.add("moving", _label_load(before), since, time.time(), version=version)

    def add_wait(self, since: float, is_paused: bool) -> None:
        """The engine has had nothing to do since then."""
        now = time.time()
        if now - since > BUSY_GAP_S:
            self.end_work()
            self.recorder.add("wait", "the end of a pause" if is_paused else "requests", since, now)

    def end_lease(self, asked_at: float, version: int | None) -> None:
        """The engine, which had `version`, has yielded, as it was asked to."""
        asked_at = self.aborted_at or asked_at
        if self.loading_since is not None:
            self.recorder.add("moving", _label_load(version), self.loading_since, asked_at)
        self.end_work()
        self.recorder.add("moving", "yield", asked_at, time.time(), version=version)

    def _continues_span(self, start: float, version: int) -> bool:
        assert self._span is not None
        # a negative duration means that the clock was set back
        is_close = start - self._span[1] < BUSY_GAP_S
        is_short = 0 <= start - self._span[0] < MAX_SPAN_S
        return is_close and is_short and version == self._version


def _label_load(version: int | None) -> str:
    return "load engine" if version is None else "load weights"
