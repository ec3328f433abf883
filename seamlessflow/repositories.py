"""The environment of repositories to repair, and the parts that make and check data sets for it."""

from sf_core.environments.repositories.check import AT_ONCE, fault_of
from sf_core.environments.repositories.environment import Repositories
from sf_core.environments.repositories.scoring import CaseOutcome, run_tests
from sf_core.environments.repositories.workspace import hide_originals

__all__ = ["AT_ONCE", "CaseOutcome", "Repositories", "fault_of", "hide_originals", "run_tests"]
