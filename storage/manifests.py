"""Manifests: the small JSON file that a stage writes when it is done and that names its inputs and outputs.

Owns the content of a manifest and the errors about a wrong one. Path and time of writing belong to
storage/run_directory.py.

The data of a stage have a schema, of the facts that readers rely on. A field without a default is in every
manifest of the stage that any version has written. A field that a later version has added has a default, so
that stored runs still load. A stage may tell more than its schema names.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from storage.files import FileRef
from storage.json_files import first_fault

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


STAGE_DATA: dict[str, type[StageData]] = {
    "start": StartData,
    "rollout": RolloutData,
    "evaluate": EvaluateData,
    "filter": FilterData,
    "train": TrainData,
    "publish": StageData,
}
"""The schema of each stage's data."""


def _code_version() -> str:
    try:
        return version("seamlessflow")
    except PackageNotFoundError:
        return "not installed"


class Manifest(BaseModel):
    """A committed stage. Its existence means that every output is complete."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    iteration: int | None
    """None for manifests of the run as a whole."""
    stage: str
    attempt: int
    """The attempt that did the work; see RunDirectory.begin_attempt."""
    inputs: dict[str, str] = {}
    """Inputs of the stage by role: relative URIs, version numbers."""
    outputs: list[FileRef] = []
    """Files that the stage wrote, with URIs relative to the run directory."""
    data: dict[str, Any] = {}
    """Facts of the stage that later stages and people need; JSON, as STAGE_DATA describes it."""
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    code_version: str = Field(default_factory=_code_version)

    @property
    def label(self) -> str:
        return self.stage if self.iteration is None else f"{self.stage} of iteration {self.iteration}"

    def files(self, kind: str) -> list[FileRef]:
        """The outputs in this folder of the run directory, such as `trajectories`."""
        return [ref for ref in self.outputs if ref.uri.startswith(f"{kind}/")]

    def has_outputs_of(self, other: Manifest) -> bool:
        return Counter(self.outputs) == Counter(other.outputs)


def parse_manifest(uri: str, text: bytes, run_id: str, iteration: int | None, stage: str) -> Manifest:
    """Raises ValueError with one sentence if the text is no manifest, or that of another stage or run."""
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise _explain_unreadable(uri, first_fault(error)) from None
    for name, expected in (("run_id", run_id), ("iteration", iteration), ("stage", stage)):
        if (value := getattr(manifest, name)) != expected:
            hint = f"; name the folder of the run {value} again" if name == "run_id" else ""
            raise ValueError(f"{uri}: manifest is for {name} {value!r}, expected {expected!r}{hint}")
    for ref in manifest.outputs:
        # a forged manifest must not make us read files outside of the run directory
        if "://" in ref.uri or ref.uri.startswith("/") or ".." in ref.uri.split("/"):
            raise ValueError(
                f"{uri}: manifest names outputs that are not in the run directory: {ref.uri[:200]}"
            )
    try:
        if stage in STAGE_DATA:
            STAGE_DATA[stage].model_validate(manifest.data)
    except ValidationError as error:
        raise _explain_unreadable(uri, f"data.{first_fault(error)}") from None
    return manifest


def _explain_unreadable(uri: str, fault: str) -> ValueError:
    return ValueError(f"{uri}: manifest cannot be read ({fault}); remove the file to repeat the stage")
