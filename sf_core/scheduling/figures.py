"""Figures of an iteration computed from its spans: idle time, utilisation, switches and their costs. Pure.

The formulas are also in docs/guides/clusters/watching.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from sf_core.scheduling.lending import Refusal, not_lent
from sf_core.scheduling.timeline import Span, idle_fraction, loading_fraction, loads, measure_covered
from sf_core.waits import Window

Cause = Literal["start", "evaluation", "loading", "requests", "hand-over"]
"""Why a device computed nothing; the first that applies counts. The table is in
docs/guides/clusters/watching.md."""


class Switch(NamedTuple):
    """A change of a device's active tag."""

    worker: str
    to: Literal["train", "rollout"]
    at: float
    """When the new tag began to hold the device, Unix seconds."""
    seconds: float | None
    """Cost of the switch. To train: from the engine's being told to yield to training's first work. To
    rollout: from the end of training to the first sampled token. None if that never came, or if the lease
    before training was lost, so that its device stood still for an unknown time."""


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Figures of one iteration, whose window runs from the end of the one before to its own end."""

    seconds: float
    """Length of the window."""
    idle: dict[str, float]
    """Idle fraction by device."""
    loading: dict[str, float]
    """Fraction of the window in which the device loaded, by device."""
    utilisation_train: float
    """Busy train time of the devices that trained, as a share of their time; 0 if none did."""
    utilisation_rollout: float
    """Busy rollout time of the devices that carried rollout, as a share of their time; 0 if none did."""
    switches: list[Switch]
    not_lent: dict[Refusal, int]
    """How often trainers were not lent, by the reason."""
    tokens_rollout_only: float
    """Tokens sampled in the window by devices that did not train in it."""
    tokens_lent: float
    """Tokens sampled by devices that trained too."""

    @property
    def utilisation_cluster(self) -> float:
        """1 - mean idle fraction."""
        return 1.0 - sum(self.idle.values()) / len(self.idle) if self.idle else 0.0

    def costs_s(self, to: Literal["train", "rollout"]) -> list[float]:
        return [s.seconds for s in self.switches if s.to == to and s.seconds is not None]


def device_figures(spans: Sequence[Span], window: Window) -> DeviceFigures:
    """Figures of one window. `spans` must reach back before it: a switch needs the tag that held before."""
    start, end = window
    inside = by_worker([span for span in spans if span.start < end and span.end > start])
    tags = {worker: {span.tag for span in own} for worker, own in inside.items()}
    tokens_of_trainers = 0.0
    tokens_of_others = 0.0
    for worker, own in inside.items():
        tokens = sum(_tokens_inside(span, window) for span in own)
        if "train" in tags[worker]:
            tokens_of_trainers += tokens
        else:
            tokens_of_others += tokens
    switches: list[Switch] = []
    for own in by_worker(spans).values():
        switches += [switch for switch in find_switches(own) if start <= switch.at < end]
    return DeviceFigures(
        seconds=end - start,
        idle={worker: idle_fraction(own, window) for worker, own in inside.items()},
        loading={worker: loading_fraction(own, window) for worker, own in inside.items()},
        utilisation_train=_utilisation("train", inside, tags, window),
        utilisation_rollout=_utilisation("rollout", inside, tags, window),
        switches=switches,
        not_lent={refusal: _num_refused(refusal, spans, window) for refusal in get_args(Refusal)},
        tokens_rollout_only=round(tokens_of_others, 1),
        tokens_lent=round(tokens_of_trainers, 1),
    )


def idle_by_cause(
    spans: Sequence[Span], windows: Sequence[Window], evaluations: Sequence[Window]
) -> dict[Cause, float]:
    """Share of the windows' time in which the device computed nothing, by cause; they add up to its idle
    share. The spans are those of one device; held-out tasks were sampled during `evaluations`."""
    causes: dict[Cause, list[Span]] = {
        "start": [_make_span(window) for window in windows[:1]],
        "evaluation": [_make_span(evaluation) for evaluation in evaluations],
        "loading": [span for span in spans if loads(span)],
        "requests": [span for span in spans if span.kind == "wait"],
        "hand-over": [_make_span(window) for window in windows],
    }
    whole = _join(windows)
    accounted = [span for span in spans if span.kind == "busy"]
    covered_before = sum(measure_covered(accounted, window) for window in whole)
    length = sum(end - start for start, end in windows)
    shares = dict.fromkeys(causes, 0.0)
    for cause, times in causes.items():
        accounted += times
        covered = sum(measure_covered(accounted, window) for window in whole)
        shares[cause] = round((covered - covered_before) / length, 4) if length else 0.0
        covered_before = covered
    return shares


def find_switches(spans: Sequence[Span]) -> list[Switch]:
    """Every change of the active tag between rollout and train of one device, in order of time.

    The spans are those of one device, sorted by time."""
    tenures = [span for span in spans if span.kind == "held" and span.tag in ("train", "rollout")]
    return [_switch(before, after, spans) for before, after in pairwise(tenures) if before.tag != after.tag]


def by_worker(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Spans by device, in their order."""
    devices: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        devices[span.worker].append(span)
    return dict(devices)


def _switch(before: Span, after: Span, spans: Sequence[Span]) -> Switch:
    first = next((span for span in spans if span.kind == "busy" and _is_part(span, after)), None)
    last = [span for span in spans if span.kind in ("busy", "moving") and _is_part(span, before)]
    cost: float | None = None
    if after.tag == "train":
        yields = [span.start for span in last if span.label == "yield"]
        if first is not None and yields:
            cost = max(0.0, first.start - yields[-1])
        return Switch(after.worker, "train", after.start, cost)
    busy_ends = [span.end for span in last if span.kind == "busy"]
    trained = busy_ends[-1] if busy_ends else before.end
    # the first sampling span of a lease ends with its first token
    if first is not None:
        cost = max(0.0, first.end - trained)
    return Switch(after.worker, "rollout", after.start, cost)


def _join(windows: Sequence[Window]) -> list[Window]:
    """Windows of which each ends before the next begins; an iteration begins where the one before ended."""
    joined: list[Window] = []
    for start, end in windows:
        begins = joined.pop()[0] if joined and joined[-1][1] == start else start
        joined.append((begins, end))
    return joined


def _make_span(window: Window) -> Span:
    return Span("", "", *window)


def _is_part(span: Span, tenure: Span) -> bool:
    return span.lease == tenure.lease and span.tag == tenure.tag and tenure.start <= span.start <= tenure.end


def _utilisation(tag: str, spans: dict[str, list[Span]], tags: dict[str, set[str]], window: Window) -> float:
    carriers = [worker for worker in spans if tag in tags[worker]]
    busy = sum(
        measure_covered((s for s in spans[worker] if s.kind == "busy" and s.tag == tag), window)
        for worker in carriers
    )
    return busy / (len(carriers) * (window[1] - window[0])) if carriers else 0.0


def _num_refused(refusal: Refusal, spans: Sequence[Span], window: Window) -> int:
    label = not_lent(refusal)
    return sum(s.kind == "wait" and s.label == label and window[0] <= s.start < window[1] for s in spans)


def _tokens_inside(span: Span, window: Window) -> float:
    if not span.tokens:
        return 0.0
    share = (min(span.end, window[1]) - max(span.start, window[0])) / max(span.end - span.start, 1e-9)
    return span.tokens * min(share, 1.0)
