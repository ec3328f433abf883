"""Predicts which share of device time a plan leaves idle, from the measured work of an iteration."""

from __future__ import annotations

from dataclasses import dataclass

from sf_core.reports.view import RunView
from sf_core.scheduling.plan import Plan
from sf_core.scheduling.timeline import read_spans


@dataclass(frozen=True, slots=True)
class Work:
    """Device-seconds of one iteration, summed over the devices."""

    rollout: float
    train: float


def measured_work(uri: str) -> Work:
    """Mean work of the iterations that a run has trained.

    Raises ValueError, one sentence, if there is no such run or it has trained none."""
    view = RunView.open(uri)
    iterations = len(view.read_committed("train"))
    if iterations == 0:
        raise ValueError(f"{uri}: no iteration was trained, so no device-seconds were measured")
    seconds = {"rollout": 0.0, "train": 0.0}
    for span in read_spans(view.run):
        if span.kind == "busy" and span.tag in seconds:
            seconds[span.tag] += span.end - span.start
    return Work(seconds["rollout"] / iterations, seconds["train"] / iterations)


def expected_bubble(plan: Plan, overlap: bool, work: Work) -> float:
    """Idle share of all devices, 0 to 1, if work could be divided freely and switching cost nothing.

    With A workers that only roll out, B trainers, R and T device-seconds of rollout and training, an
    iteration takes at least

        without overlap   R / (A + B if lent else A) + T / B
        with overlap      max(T / B, (R + T) / (A + B) if lent else R / A)

    seconds, of which every device works (R + T) / (A + B) on average. Long sessions, unequal devices,
    switches and orchestration come on top: this is a lower bound.

    >>> plan = Plan(rollout=("r0",), trainers=("t0",), lent=False, agent=())
    >>> expected_bubble(plan, True, Work(rollout=3.0, train=1.0))
    0.333
    """
    alone = len(plan.rollout)
    trainers = len(plan.trainers)
    fair_share = (work.rollout + work.train) / (alone + trainers)
    training = work.train / trainers
    if overlap:
        seconds = max(training, fair_share if plan.lent else work.rollout / alone)
    else:
        seconds = work.rollout / (alone + trainers * plan.lent) + training
    return round(max(0.0, 1.0 - fair_share / seconds), 3)
