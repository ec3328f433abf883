"""What every device did and when: spans in which it was held under an active tag, and in them what it
computed, what it moved and what it waited for. A bubble is time without a computing span.

Owns how spans are recorded and stored; figures.py computes from them, sf_core/reports shows them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from sf_core.waits import Stopwatch, in_order
from storage.files import FileRef
from storage.json_files import first_fault
from storage.run_directory import RunDirectory

Kind = Literal["held", "busy", "moving", "wait"]

MAX_UNWRITTEN_S = 15.0
"""How long spans may stay unwritten: a lease can last as long as the run, and a crash loses these spans."""


@dataclass(frozen=True, slots=True)
class Span:
    worker: str
    tag: str
    """The device's active tag."""
    start: float
    """Unix seconds."""
    end: float
    kind: Kind = "busy"
    """held: the tag holds the device. busy: it computes. moving: it loads, saves or hands over, and computes
    nothing. wait: it stands still."""
    label: str = ""
    """What the device did (`sample`, `train`, `load engine`, `load weights`, `load trainer`, `save`,
    `yield`), or what it waited for."""
    version: int | None = None
    """Policy version sampled with or updated; iteration k updates version k."""
    lease: str = ""
    """Id of the lease or train step."""
    tokens: int = 0
    """Number of tokens sampled."""


class Timeline:
    """Records the spans of one lease or train step, during which the device is held.

    A thread of its own writes them in parts, each once: at every `flush`, every 15 s and on exit, which
    raises the error of a part that could not be written."""

    def __init__(self, directory: RunDirectory, worker: str, tag: str, lease: str) -> None:
        self._directory = directory
        self._worker = worker
        self._tag = tag
        self._lease = lease
        self._spans: list[Span] = []
        self._written_until = time.time()
        self._written_at = time.monotonic()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="timeline")
        self._parts: list[Future[FileRef]] = []

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.flush()
        self._writer.shutdown()
        if error is None:
            for part in self._parts:
                part.result()

    def add(
        self,
        kind: Kind,
        label: str,
        start: float,
        end: float,
        *,
        version: int | None = None,
        tokens: int = 0,
    ) -> None:
        """Record a span; times are in Unix seconds."""
        window = in_order(start, end)
        span = Span(self._worker, self._tag, *window, kind, label, version, self._lease, tokens)
        self._spans.append(span)
        if time.monotonic() - self._written_at > MAX_UNWRITTEN_S:
            self.flush()

    @contextmanager
    def record(self, kind: Kind, label: str, version: int | None = None) -> Iterator[None]:
        watch = Stopwatch()
        try:
            yield
        finally:
            self.add(kind, label, watch.since, watch.now, version=version)

    def flush(self) -> None:
        """Hand all spans up to now to the writer thread."""
        # a part is named by its end: two must not end in the same microsecond
        start = self._written_until
        self._written_until = max(time.time(), self._written_until + 1e-5)
        self._written_at = time.monotonic()
        tenure = Span(self._worker, self._tag, start, self._written_until, "held", lease=self._lease)
        spans = [tenure, *self._spans]
        self._spans = []
        self._parts = [part for part in self._parts if not part.done() or part.exception()]
        self._parts.append(self._writer.submit(self._write, spans, self._written_until))

    def _write(self, spans: list[Span], until: float) -> FileRef:
        data = json.dumps([asdict(span) for span in spans]).encode()
        return self._directory.write_timeline(f"{self._worker}-{self._tag}-{self._lease}", until, data)


def read_spans(directory: RunDirectory, since: float = 0.0) -> list[Span]:
    """The spans of a run that ended after `since` (Unix seconds), by worker and time; those that began long
    before may be cut."""
    parts = directory.read_timelines(since)
    # earlier versions have written spans that end before they begin, after a change of the clock
    spans = [
        replace(span, end=in_order(span.start, span.end)[1])
        for uri, data in parts.items()
        for span in _parse(uri, data)
    ]
    return sorted(_join_held(spans), key=lambda span: (span.worker, span.start))


_SPANS = TypeAdapter(list[Span])


def _parse(uri: str, data: bytes) -> list[Span]:
    try:
        return _SPANS.validate_json(data)
    except ValidationError as error:
        raise ValueError(f"{uri}: not a valid timeline file: {first_fault(error)}; remove the file") from None


def _join_held(spans: list[Span]) -> Iterator[Span]:
    """Spans with the `held` spans of a lease joined into one, of which every written part has its own."""
    last: dict[tuple[str, str], Span] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind != "held":
            yield span
            continue
        before = last.get(lease := (span.worker, span.lease))
        if before is not None and span.start <= before.end:
            last[lease] = replace(before, end=max(before.end, span.end))
            continue
        if before is not None:
            yield before
        last[lease] = span
    yield from last.values()


def measure_covered(spans: Iterable[Span], window: tuple[float, float]) -> float:
    """Seconds of the window that lie in at least one of the spans."""
    start, end = window
    covered = 0.0
    reached = start
    for span in sorted(spans, key=lambda s: s.start):
        left = max(span.start, reached)
        right = min(span.end, end)
        if right > left:
            covered += right - left
            reached = right
    return covered


def idle_fraction(spans: Iterable[Span], window: tuple[float, float]) -> float:
    """Share of the window in which the device computed nothing: 1 - |union of busy spans| / |window|.

    >>> idle_fraction([Span("t0", "train", 0, 4), Span("t0", "rollout", 3, 6)], (0, 10))
    0.4
    """
    length = window[1] - window[0]
    if length <= 0:
        return 0.0
    return round(1.0 - measure_covered((s for s in spans if s.kind == "busy"), window) / length, 6)


def loading_fraction(spans: Iterable[Span], window: tuple[float, float]) -> float:
    """Share of the window in which the device loaded an engine, weights or the trainer: idle, but not for
    want of work.

    >>> loading_fraction([Span("r0", "rollout", 0, 4, "moving", "load engine")], (0, 10))
    0.4
    """
    length = window[1] - window[0]
    return round(measure_covered(filter(loads, spans), window) / length, 6) if length > 0 else 0.0


def loads(span: Span) -> bool:
    """Whether the device loaded an engine, weights or the trainer."""
    return span.kind == "moving" and span.label.startswith("load ")
