"""An iteration of a run, and the facts of its stages, as the manifests tell them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sf_core.recipes.gates import KINDS, Kind
from sf_core.scheduling.leases import lease_of
from sf_core.waits import Window, in_order, rate
from storage.manifests import Manifest
from storage.run_directory import STAGES


@dataclass(frozen=True, slots=True)
class Iteration:
    number: int
    stages: Mapping[str, Manifest]
    """Committed manifests: of stages, and of `evaluate` if this version was evaluated."""
    published_before: Manifest | None
    """The manifest that ended the iteration before."""

    @property
    def is_complete(self) -> bool:
        return all(stage in self.stages for stage in STAGES)

    @property
    def reward(self) -> float:
        """Mean reward of the sampled sessions."""
        reward: float = self.stages["rollout"].data["reward_mean"]
        return reward

    @property
    def lag(self) -> float | None:
        """Mean lag of the tokens that the filter kept; None if it kept none."""
        lags = self.stages["filter"].data.get("lags", [])
        return sum(lag * count for lag, count in enumerate(lags)) / sum(lags) if any(lags) else None

    @property
    def window(self) -> Window:
        """From the end of the iteration before to its own end, once it is complete; for an attempt's first
        iteration, from the start of the first stage that this attempt committed."""
        last = self.stages["publish"]
        before = self.published_before
        if before is not None and before.attempt == last.attempt:
            return in_order(before.data["finished_at"], last.data["finished_at"])
        begun = next(m for stage in STAGES if (m := self.stages[stage]).attempt == last.attempt)
        return in_order(begun.data["started_at"], last.data["finished_at"])

    @property
    def kinds(self) -> dict[Kind, int] | None:
        return kinds_in(self.stages.get("rollout"))

    @property
    def seconds(self) -> float:
        """Length of its window."""
        start, end = self.window
        return end - start

    @property
    def tokens_per_second(self) -> float | None:
        """None: the clocks of its stages disagree, so that its length is not known."""
        return rate(self.sampled_tokens, self.seconds)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled in its window, evaluations included; not those of stages of an earlier attempt."""
        last = self.stages["publish"].attempt
        return sum(m.data.get("sampled_tokens", 0) for m in self.stages.values() if m.attempt == last)


def stage_time(manifest: Manifest) -> Window:
    """When a stage began and ended, in Unix seconds."""
    return in_order(manifest.data["started_at"], manifest.data["finished_at"])


def failures_of(manifest: Manifest) -> dict[str, int]:
    """Numbers of failed sessions of a rollout or an evaluation that count, by the reason, and of those that
    were not judged."""
    unjudged = manifest.data.get("unjudged")
    return manifest.data["failures"] | ({"not_judged": unjudged} if unjudged else {})


def runners_of(rollout: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """The cost of the runner of each worker until a batch was sealed (`Spent`), from its manifest. Empty for
    runs of earlier versions, which did not count it."""
    spent: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for holder, costs in rollout.get("runners", {}).items():
        spent[lease_of(holder)[0]].update(costs)
    return spent


def kinds_in(manifest: Manifest | None) -> dict[Kind, int] | None:
    """Groups that left with a batch, by whether all, some or none of their sessions were right. None if the
    run did not choose."""
    data = {} if manifest is None else manifest.data
    return {kind: data[kind] for kind in KINDS} if data.keys() >= set(KINDS) else None


def kinds_text(kinds: Mapping[Kind, int] | None) -> str:
    return "" if kinds is None else "/".join(str(kinds[kind]) for kind in KINDS)
