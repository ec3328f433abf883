"""Doses and recipes that benchmarks/curricula.py compares, what was predicted of them before the first run,
and what came of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

EASY_GOAL = 0.95
POOL = 256

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Quantile .975 of Student's t by the number of pairs."""

DOSES: dict[str, dict[str, Any]] = {
    "0/0/0": {},
    ".5/.1/0": {"easy": 0.5, "impossible": 0.1},
    ".3/.3/.1": {"easy": 0.3, "impossible": 0.3, "random": 0.1},
    ".5/.1/0 flips .1": {"easy": 0.5, "impossible": 0.1, "flips": 0.1},
    ".3/.3/.1 told of others": {"easy": 0.3, "impossible": 0.3, "random": 0.1, "tells_others": True},
}
"""Shares of easy, impossible and random tasks, as settings of the environment."""


def curriculum(**rules: Any) -> dict[str, Any]:
    return {"curriculum": {"pool": POOL, **rules}}


RECIPES: dict[str, dict[str, Any]] = {
    "uniform": curriculum(),
    "srpo": curriculum(solved=0.0),
    "srpo, solved_share .85": curriculum(solved=0.0, solved_share=0.85),
    "dapo": curriculum() | {"gate": {"kind": "mixed", "least": 1}},
    "progress": curriculum(order="draw", utility="progress"),
}
"""What differs between the runs of one dose, as settings of `rollout`."""


class Cell(NamedTuple):
    dose: str
    recipe: str


PLAN = (
    (Cell(".5/.1/0", "uniform"), Cell(".5/.1/0", "srpo")),
    (Cell(".5/.1/0", "dapo"),),
    (Cell(".3/.3/.1", "uniform"), Cell(".3/.3/.1", "progress")),
    (Cell("0/0/0", "uniform"), Cell("0/0/0", "srpo")),
    (Cell(".3/.3/.1 told of others", "progress"),),
    (Cell(".5/.1/0 flips .1", "uniform"), Cell(".5/.1/0 flips .1", "srpo, solved_share .85")),
    (Cell(".5/.1/0 flips .1", "srpo"),),
)
"""The runs in their order: those of one line seed by seed, so that pairs see the same machine."""

BASELINES = {".3/.3/.1 told of others": ".3/.3/.1"}
"""Dose of the baseline, where it is another one: uniform remembers nothing that it could be told wrong."""


class Claim(NamedTuple):
    """What was predicted of the ratio to uniform, and the range in which its interval must lie; with
    `holds_one` the interval must hold 1."""

    dose: str
    recipe: str
    predicted: float
    figure: str = "tokens"
    least: float = 0.0
    most: float = math.inf
    holds_one: bool = False

    def holds(self, found: Sequence[float]) -> bool:
        _, low, high = found
        return low <= 1 <= high if self.holds_one else self.least <= low and high < self.most

    @property
    def expected(self) -> str:
        if self.holds_one:
            within = "the interval holds 1"
        elif math.isinf(self.most):
            within = "reported only"
        else:
            least = f"{self.least:g} to " if self.least else "below "
            within = f"interval {least}{self.most:g}"
        return f"{self.predicted:g}, {within}"

    @property
    def told(self) -> str:
        return f"{self.dose}, {self.recipe}, {self.figure}: {self.expected}"


CLAIMS = (
    Claim("0/0/0", "srpo", 0.99, least=0.8, most=1.25),
    Claim(".5/.1/0", "srpo", 0.59, most=0.85),
    Claim(".5/.1/0", "dapo", 1.03, least=0.8, most=1.25),
    Claim(".5/.1/0", "dapo", 0.35, "iterations", most=0.6),
    Claim(".3/.3/.1", "progress", 0.57, most=0.9),
    Claim(".5/.1/0 flips .1", "srpo, solved_share .85", 0.59, most=0.85),
    Claim(".5/.1/0 flips .1", "srpo", 0.68),
    Claim(".3/.3/.1 told of others", "progress", 1.0, holds_one=True),
)
"""Predictions from a toy learner under the real rollout manager, written before the first run. In the toy,
progress also spent 20 % of its tokens on random tasks. The toy's steps grow with the share of groups that
teach. AdamW's grow with its root at most, so smaller effects, and more tokens for dapo, would be no
surprise."""


@dataclass(frozen=True)
class Measured:
    """Figures of one run, up to the goal or to its end."""

    dose: str
    recipe: str
    seed: int
    reached: bool
    tokens: float
    """Sampled tokens of training sessions, dropped and unfinished ones included."""
    iterations: float
    live: dict[int, float]
    """Held-out rewards of live tasks by version; the goal is on the line between two."""
    easy: dict[int, float]
    token_shares: dict[str, float]
    """Share of each kind of task in the tokens of the groups that have ended."""
    groups: dict[str, int]
    """Numbers of groups that have ended, by all right, mixed and all wrong."""
    seconds: float
    commit: str

    @property
    def key(self) -> tuple[str, str, int]:
        return self.dose, self.recipe, self.seed


def summary(runs: Sequence[Measured]) -> dict[str, Any]:
    """Ratios of every cell to uniform, and what came of each claim; None where runs are missing."""
    cells = {Cell(run.dose, run.recipe): None for run in runs if run.recipe != "uniform"}
    ratios = {cell: compare(runs, cell) for cell in cells}
    return {
        "commits": sorted({run.commit for run in runs}),
        "ratios": {f"{cell.dose}: {cell.recipe}": found for cell, found in ratios.items()},
        "claims": [result_of(claim, ratios.get(Cell(claim.dose, claim.recipe))) for claim in CLAIMS],
    }


def result_of(claim: Claim, ratios: dict[str, Any] | None) -> dict[str, Any]:
    if ratios is None:
        return {"claim": claim.told, "found": None, "shown": "not run"}
    found = ratios[claim.figure]
    mean, low, high = found
    shown = f"{mean:.2f} ({low:.2f} to {high:.2f})"
    if claim.dose.startswith(".3/.3/.1"):
        shown += f", {ratios['random_share']:.0%} of the tokens on random tasks"
    if censored := sum(own or base for own, base in ratios["censored"]):
        shown += f"; {censored} of {len(ratios['seeds'])} pairs without the goal"
    if not ratios["easy_stays"]:
        shown += f"; easy tasks fell below {EASY_GOAL}"
    return {"claim": claim.told, "found": found, "holds": claim.holds(found), "shown": shown}


def compare(runs: Sequence[Measured], cell: Cell) -> dict[str, Any] | None:
    """None with fewer than two pairs, which have no interval."""
    base = Cell(BASELINES.get(cell.dose, cell.dose), "uniform")
    own, other = ({run.seed: run for run in runs if run.key[:2] == side} for side in (cell, base))
    pairs = [(own[seed], other[seed]) for seed in sorted(own.keys() & other.keys())]
    if len(pairs) < 2:
        return None
    shares = [run.token_shares.get("random", 0.0) for run, _ in pairs]
    return {
        "seeds": [run.seed for run, _ in pairs],
        "tokens": interval([run.tokens / base.tokens for run, base in pairs]),
        "iterations": interval([run.iterations / base.iterations for run, base in pairs]),
        "censored": [[not run.reached, not base.reached] for run, base in pairs],
        "random_share": round(statistics.mean(shares), 3),
        "easy_least": min(min(run.easy.values()) for run, _ in pairs),
        "easy_stays": all(list(run.easy.values())[-1] >= EASY_GOAL for run, _ in pairs),
    }


def interval(ratios: Sequence[float]) -> list[float]:
    """Geometric mean, and the ends of its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    count = len(logs)
    half = STUDENT[count] * statistics.stdev(logs) / math.sqrt(count)
    return [round(math.exp(at), 3) for at in (mean, mean - half, mean + half)]
