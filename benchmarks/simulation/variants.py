"""The pipelines side by side on the same simulated devices and sessions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from benchmarks.simulation.device import Failures
from benchmarks.simulation.fleet import Turn
from benchmarks.simulation.idle import added_up
from benchmarks.simulation.outcome import Simulated
from benchmarks.simulation.overheads import Overheads
from benchmarks.simulation.simulator import Turns, simulate
from sf_core.config import RunConfig
from sf_core.config.devices import Device, find_device
from sf_core.config.pipelines import PipelineName
from sf_core.models.counter import uniforms
from sf_core.scheduling.figures import device_figures
from sf_core.scheduling.plan import Worker, make_plan

BLOCK = 16
"""Members of a group that draw from one generator: one for each would cost more than the simulation."""

WARMUP = 2
"""First iterations that are not counted: none precedes the first, and no switch is measured yet."""


class Variant(NamedTuple):
    pipeline: PipelineName
    overlap: bool


VARIANTS = {
    "colocated": Variant("colocated", overlap=True),
    "colocated_drained": Variant("colocated", overlap=False),
    "disaggregated": Variant("disaggregated", overlap=False),
    "async": Variant("async", overlap=True),
    "multiplexed": Variant("multiplexed", overlap=True),
}
"""The pipelines. colocated: sessions that a train step cuts go on after it (partial rollout).
colocated_drained: every session ends before the train step, as common frameworks have it."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of a cluster: `dual` of them can train and roll out, `rollout` only roll out. Colocated
    pipelines have as many devices, all of them dual. Kinds are names of config.devices.DEVICES; None is the
    device of the configuration's `emulation`."""

    rollout: int
    dual: int
    rollout_kind: str | None = None
    dual_kind: str | None = None

    def workers_of(self, variant: Variant) -> list[Worker]:
        """Raises ValueError for a kind that is not known."""
        dual = frozenset(("rollout", "train"))
        others = dual if variant.pipeline == "colocated" else frozenset(("rollout",))
        return [
            *(Worker(f"t{i}", dual, _device(self.dual_kind)) for i in range(self.dual)),
            *(Worker(f"r{i}", others, _device(self.rollout_kind)) for i in range(self.rollout)),
            Worker("a0", frozenset(("agent",))),
            Worker("c0", frozenset(("cpu",))),
        ]


def _device(kind: str | None) -> Device | None:
    return find_device(kind) if kind else None


@dataclass(frozen=True, slots=True)
class Tools:
    """Tool calls between an agent's turns, which take median x exp(sigma x normal) seconds."""

    turn: int
    """Tokens sampled per turn; the last turn of a session samples the rest."""
    result: int
    """Tokens that a tool returns."""
    median_s: float
    sigma: float

    def num_turns(self, length: int) -> int:
        return math.ceil(length / self.turn)

    def seconds(self, group: int, member: int, num_turns: int) -> list[float]:
        """Tool time after each turn of a session, the same in every run; 0 after the last."""
        draws = uniforms(group * 2**16 + member, np.arange(num_turns - 1))
        normals = (_NORMAL.inv_cdf(max(draw, 2**-53)) for draw in draws.tolist())
        return [*(self.median_s * math.exp(self.sigma * normal) for normal in normals), 0.0]


TOOLS = Tools(turn=200, result=100, median_s=1.0, sigma=1.2)
"""Most calls read a file or run a command, in tenths of a second; some run tests, for tens of seconds. One in
twenty takes less than 0.14 s, one in twenty more than 7 s, and the mean is 2 s. With engines that sample a
hundred tokens per second for each of their requests, tools take half of a session's time."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Sessions whose lengths have a heavy tail, the same in every run: median x exp(sigma x normal) sampled
    tokens, cut at `longest`."""

    prompt: int
    median: float
    sigma: float
    longest: int
    tools: Tools | None = None
    """None: a session is one turn."""

    def length(self, group: int, member: int) -> int:
        """Tokens that a session samples in all its turns."""
        length = self.median * math.exp(self.sigma * _NORMAL.inv_cdf(draw(group, member)))
        return round(min(max(length, 1), self.longest))

    def __call__(self, group: int, member: int) -> list[Turn]:
        length = self.length(group, member)
        tools = self.tools
        if tools is None:
            return [Turn(self.prompt, length)]
        num_turns = tools.num_turns(length)
        last = length - tools.turn * (num_turns - 1)
        return [
            Turn(tools.result if i else self.prompt, last if i == num_turns - 1 else tools.turn, seconds)
            for i, seconds in enumerate(tools.seconds(group, member, num_turns))
        ]

    @property
    def longest_context(self) -> int:
        """Tokens of the longest session, prompt included."""
        results = self.tools.result * (self.tools.num_turns(self.longest) - 1) if self.tools else 0
        return self.prompt + self.longest + results


def lognormal_for(
    config: RunConfig, *, prompt: int, median: float, sigma: float, tools: Tools | None = None
) -> Lognormal:
    """Session lengths for a run: the sampled tokens of all turns together are cut at `rollout.max_tokens`.

    Raises ValueError, one sentence, if that cuts most sessions to one length, which would compare nothing, or
    if an engine has no room for the longest."""
    budget = config.rollout.turn_tokens
    room = config.engine.context
    if median > budget:
        raise ValueError(
            f"rollout.max_tokens ({budget}) would cut most sessions to one length, as their median is "
            f"{median:g} tokens: set it to several times that, or --median lower"
        )
    sessions = Lognormal(prompt, median, sigma, budget, tools)
    if (longest := sessions.longest_context) > room:
        results = f", {longest - prompt - budget} from tools" if tools else ""
        raise ValueError(
            f"engine.context_length ({room}) has no room for a prompt of {prompt} tokens{results} and "
            f"rollout.max_tokens ({budget}): set it to {longest} or more, or --prompt lower"
        )
    return sessions


_NORMAL = NormalDist()


def draw(group: int, member: int) -> float:
    """Uniform in (0, 1), the same in every run."""
    return _draws(group, member // BLOCK)[member % BLOCK]


@lru_cache(maxsize=1024)
def _draws(group: int, block: int) -> list[float]:
    draws = np.random.default_rng((group, block)).uniform(2**-53, 1.0, BLOCK)
    return list(map(float, draws))


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """Figures over the iterations after the warm-up, without the last one, which no later one overlaps."""

    tokens_per_second: float
    seconds_per_iteration: float
    idle_fraction: float
    idle_by_cause: dict[str, float]
    """The same in parts, the largest first (idle.py)."""
    max_lag: int
    switches: int
    """Changes of a device's active tag, in both directions."""


def configure(config: RunConfig, variant: Variant, devices: Devices) -> RunConfig:
    """The configuration with this pipeline, and one rank per device that can train."""
    settings = config.model_dump()
    settings["pipeline"] = variant.pipeline
    settings["rollout"]["overlap"] = variant.overlap
    settings["train"]["workers"] = sum("train" in worker.tags for worker in devices.workers_of(variant))
    return RunConfig.model_validate(settings)


def simulate_variant(
    config: RunConfig,
    variant: Variant,
    devices: Devices,
    turns: Turns,
    *,
    overheads: Overheads | None = None,
    failures: Failures | None = None,
) -> Simulated:
    """Raises ValueError, one sentence, if the pipeline cannot run on these devices."""
    chosen = configure(config, variant, devices)
    workers = devices.workers_of(variant)
    plan = make_plan(workers, chosen)
    by_name = {worker.name: worker.device for worker in workers if worker.device}
    return simulate(chosen, plan, turns, devices=by_name, overheads=overheads, failures=failures)


def figures_of(simulated: Simulated) -> PipelineFigures:
    """Raises ValueError for fewer than four iterations: nothing would be left to count."""
    counted = simulated.iterations[WARMUP:-1]
    if not counted:
        raise ValueError(f"train.iterations must be at least {WARMUP + 2} to leave one that is typical")
    window = counted[0].start, counted[-1].end
    found = device_figures(simulated.spans, window)
    return PipelineFigures(
        tokens_per_second=round(sum(iteration.tokens for iteration in counted) / found.seconds, 1),
        seconds_per_iteration=round(found.seconds / len(counted), 3),
        idle_fraction=round(1.0 - found.utilisation_cluster, 4),
        idle_by_cause={
            cause: round(seconds / (found.seconds * len({span.worker for span in simulated.spans})), 4)
            for cause, seconds in added_up(iteration.idle for iteration in counted).items()
        },
        max_lag=max(iteration.max_lag for iteration in counted),
        switches=len(found.switches),
    )
