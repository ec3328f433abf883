"""What the checks before a run ask of this machine and of the run's folders.

A fact is gathered once, when a check first asks for it. A fact that is not known in this process is None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, TypeVar

from sf_core.config import RunConfig
from sf_core.environments.splits import Split
from sf_core.scheduling.cluster import scheduler_of
from sf_core.scheduling.plan import Worker
from sf_core.stages.preflight.lora import TrainedAdapter
from sf_core.stages.preflight.sizes import PolicySizes
from sf_core.stages.preflight.start_folder import (
    adapter_to_start_from,
    folder_to_start_from,
    name_built_in_shape,
)
from sf_core.stages.preflight.stored_config import has_started
from sf_core.stages.preflight.teacher import find_here
from sf_core.training.policy_folder import read_model_config
from sf_core.training.teacher_folder import TeacherFolder

T = TypeVar("T")

SPLITS: tuple[Split, ...] = ("holdout", "train")


class UnknownFactError(LookupError):
    """A fact is not known in this process."""


def known(fact: T | None) -> T:
    """The fact. Raises UnknownFactError if it is not known, so that the check that asks for it is skipped."""
    if fact is None:
        raise UnknownFactError
    return fact


class Facts:
    """Facts about one run. Gathering one raises ValueError or OSError, one sentence, if it cannot be read."""

    def __init__(
        self,
        config: RunConfig,
        *,
        in_flow: bool = False,
        splits: Collection[Split] = (),
        writes: bool = False,
        starts_services: bool = False,
    ) -> None:
        self.config = config
        self.in_flow = in_flow
        """Folders, programs and packages may exist only on workers."""
        self.splits = splits
        """Splits of which the first or last tasks are asked for."""
        self.writes = writes
        """The run is about to write weights and checkpoints."""
        self.starts_services = starts_services
        """This machine is about to start the processes that the configuration does not name."""
        self.workers: Collection[Worker] | None = None
        """The workers of the run, as soon as the caller knows them."""
        self.passed: set[Check] = set()
        """Checks that found nothing wrong."""

    @cached_property
    def has_started(self) -> bool:
        return has_started(self.config)

    @cached_property
    def workers_are_here(self) -> bool | None:
        return None if self.in_flow else scheduler_of(self.config) is None

    @cached_property
    def folder(self) -> str | None:
        """Folder of the model that the run starts from; None also for the built-in policy."""
        return None if self.config.policy.model is None else folder_to_start_from(self.config, self.in_flow)

    @cached_property
    def shape(self) -> Mapping[str, Any] | None:
        """The shape of the policy, named as in Hugging Face's config.json."""
        if self.config.policy.model is None:
            return name_built_in_shape(self.config)
        return None if self.folder is None else read_model_config(self.folder)

    @cached_property
    def adapter(self) -> TrainedAdapter | None:
        """The adapter that the run starts from; None also if it trains all weights."""
        if self.config.train.lora is None or self.shape is None:
            return None
        return adapter_to_start_from(self.config, self.shape, self.in_flow)

    @cached_property
    def teacher(self) -> TeacherFolder | None:
        """The folder of the teacher; None also if trainers hold no teacher."""
        return find_here(self.config, self.in_flow)

    @cached_property
    def sizes(self) -> PolicySizes | None:
        return PolicySizes.of(self.config)


Check = Callable[[RunConfig, Facts], str | None]
"""Says in one sentence what is wrong; None if nothing is. May also raise ValueError or OSError, as what it
reads with does."""
