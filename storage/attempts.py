"""The record that each flow attempt on a run leaves in the run directory."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Attempt(BaseModel):
    """One flow attempt on a run."""

    model_config = ConfigDict(frozen=True)

    dataplane: str | None = None
    """URL of the data plane that serves the attempt; empty once that data plane is gone for good."""
    host: str | None = None
    """Machine on which the attempt began; on another one, a loopback URL means another data plane."""
    evaluate_only: bool = False
    """The attempt measures a policy version and trains nothing."""
