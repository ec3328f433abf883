"""The data of manifests, by stage: the facts that readers rely on.

A field without a default is in every manifest of this stage that any version has written. A field that a
later version has added has a default, so that stored runs still load. A stage may tell more than its schema
names.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

Counts = dict[str, int]


class _Facts(BaseModel):
    # strict: readers get the values as they are in the file
    model_config = ConfigDict(frozen=True, extra="allow", strict=True)


class WaitFacts(_Facts):
    what: str
    start: float
    """Unix seconds, as all times here."""
    end: float


class JudgeFacts(_Facts):
    """What a judge was asked, and how it replied."""

    calls: int
    tokens: int
    cached: int
    unread: int
    p95_seconds: float
    agreement: float | None
    discarded: Counts = {}


class StageData(_Facts):
    """Facts of every stage."""

    started_at: float
    finished_at: float
    waits: list[WaitFacts] = []


class AdapterFacts(_Facts):
    rank: int
    alpha: float
    targets: list[str]
    parameters: int


class StartData(StageData):
    origin: str = ""
    copied_s: float = 0.0
    parameters: int = 0
    dtype: str | None = None
    adapter: AdapterFacts | None = None
    derived: dict[str, Any] = {}


class _SessionData(StageData):
    """Facts of a stage that has sessions written."""

    reward_mean: float
    sessions: int
    failures: Counts
    sampled_tokens: int = 0
    unjudged: int | None = None
    judges: dict[str, JudgeFacts] = {}
    noted: dict[str, float] = {}


class RolloutData(_SessionData):
    groups: list[int]
    rejected: dict[str, str]
    max_lag: int
    discarded: Counts = {}
    last_error: str | None = None
    late_reports: int = 0
    refused_reports: int = 0
    answers: int = 0
    cut_answers: int = 0
    reward_min: float | None = None
    reward_max: float | None = None
    runners: dict[str, dict[str, float]] = {}
    runners_seconds: float | None = None
    engines_free: float | None = None
    right: int = 0
    mixed: int = 0
    wrong: int = 0
    length_kept: float | None = None
    length_cut: float | None = None
    cut_sessions: int | None = None


class EvaluateData(_SessionData):
    num_tasks: int = 0
    by_environment: dict[str, float] = {}


class FilterData(StageData):
    lags: list[int] = []
    zero_advantage_share: float | None = None


class TrainData(StageData):
    version: int
    device: str
    teacher: str | None = None
    teacher_kl: float | None = None
    grad_norm: float | None = None


DATA: dict[str, type[StageData]] = {
    "start": StartData,
    "rollout": RolloutData,
    "evaluate": EvaluateData,
    "filter": FilterData,
    "train": TrainData,
    "publish": StageData,
}
"""The schema of each stage's data."""
