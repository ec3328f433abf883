"""What training asks of the run whose policy it trains."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from sf_core.config import RunConfig
from storage.run_directory import RunDirectory


class TrainedRun(Protocol):
    """An open run; `sf_core.stages.run.Run` is one."""

    config: RunConfig
    directory: RunDirectory

    @property
    def ref(self) -> Hashable:
        """Names the run and the attempt that works on it."""

    @property
    def start_dir(self) -> str:
        """The Hugging Face folder whose weights are version 0."""
