"""What every device did and when: spans in which it was held under an active tag, and spans in which it
computed. A bubble is time without a computing span.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Literal

from storage.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Span:
    worker: str
    tag: str
    """The device's active tag."""
    start: float
    """Unix seconds."""
    end: float
    kind: Literal["held", "busy"] = "busy"
    label: str = ""


class Timeline:
    """Collects the spans of one lease or train step and writes them under a name of their own."""

    def __init__(self, directory: RunDirectory, worker: str, tag: str, name: str) -> None:
        self._directory, self._worker, self._tag, self._name = directory, worker, tag, name
        self._spans: list[Span] = []
        self._held_from = time.time()
        self._written_at = time.monotonic()

    def busy(self, start: float, end: float, label: str = "") -> None:
        self._spans.append(Span(self._worker, self._tag, start, end, "busy", label))
        # a lease can last as long as the run: what a crash may lose is bounded
        if time.monotonic() - self._written_at > 15.0:
            self.write()

    @contextmanager
    def computing(self, label: str = "") -> Iterator[None]:
        start = time.time()
        yield
        self.busy(start, time.time(), label)

    def write(self) -> None:
        """Write everything up to now; the device was held since this object was made."""
        self._written_at = time.monotonic()
        held = Span(self._worker, self._tag, self._held_from, time.time(), "held")
        data = json.dumps([asdict(span) for span in [held, *self._spans]]).encode()
        self._directory.write_timeline(f"{self._worker}-{self._name}", data)


def read_spans(directory: RunDirectory) -> list[Span]:
    """All spans of a run, by worker and time."""
    spans = [Span(**item) for data in directory.read_timelines() for item in json.loads(data)]
    return sorted(spans, key=lambda span: (span.worker, span.start))


def idle_fraction(spans: Iterable[Span], window: tuple[float, float]) -> float:
    """Share of the window in which the device computed nothing: 1 - |union of busy spans| / |window|.

    >>> idle_fraction([Span("t0", "train", 0, 4), Span("t0", "rollout", 3, 6)], (0, 10))
    0.4
    """
    start, end = window
    busy, reached = 0.0, start
    for span in sorted((s for s in spans if s.kind == "busy"), key=lambda s: s.start):
        left, right = max(span.start, reached), min(span.end, end)
        if right > left:
            busy += right - left
            reached = right
    return round(1.0 - busy / (end - start), 6) if end > start else 0.0


def gaps(spans: Iterable[Span]) -> list[tuple[str, float]]:
    """Times a device was held by nobody while its active tag changed: (from->to, seconds).

    The spans are those of one device, sorted by time."""
    held = [span for span in spans if span.kind == "held"]
    return [
        (f"{before.tag}->{after.tag}", after.start - before.end)
        for before, after in pairwise(held)
        if before.tag != after.tag
    ]
