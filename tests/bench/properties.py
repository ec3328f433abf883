"""Where the random examples and numbers of tests come from.

In `make test` and `make test-system` they are the same for everybody. `make nightly` (SF_EXAMPLES=all) draws
three times as many examples, from a new seed that pytest's header names. `--hypothesis-seed` names the seed.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.internal.constants_ast import Constants, constants_from_module
from sortedcontainers import SortedSet

ALL = os.environ.get("SF_EXAMPLES") == "all"
SEED = pytest.StashKey[int]()
ROOT = Path(__file__).parents[2]
SOURCES = ("sf_core", "storage", "tasks", "flows", "benchmarks", "examples")


def examples(number: int) -> int:
    """How many examples a property is tried on: a third of `number`, and all of them in `make nightly`."""
    return number if ALL else max(5, number // 3)


# how long an example takes is the machine's matter
settings.register_profile(
    "same",
    settings.get_profile("default"),
    # of a property that names no number
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
    derandomize=True,
)
settings.register_profile("anew", settings.get_profile("same"), derandomize=False, print_blob=True)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose how to draw, unless a profile is given. Runs before Hypothesis reads the seed."""
    if ALL and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(secrets.randbelow(2**32))
    seed = config.option.hypothesis_seed
    if seed is not None and not seed.isdecimal():
        raise pytest.UsageError(
            f"--hypothesis-seed is {seed!r}: use a whole number, as pytest's header names one"
        )
    config.stash[SEED] = int(seed or 0)
    if config.option.hypothesis_profile is None:
        settings.load_profile("same" if seed is None else "anew")
    # else it draws constants of those of our modules that are imported, which earlier tests decide
    HypothesisProvider._local_constants = read_constants() if ALL else Constants()


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.option.hypothesis_seed
    if seed is None:
        return "examples: the same every time"
    return f"examples: drawn anew; again with {'SF_EXAMPLES=all ' * ALL}pytest --hypothesis-seed={seed}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have torch draw the same numbers in a test, whichever tests ran before in the process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(item.config.stash[SEED])


def read_constants() -> Constants:
    """The constants of all of our modules, in an order that does not depend on hashes."""
    found = Constants()
    for path in (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        found |= constants_from_module(module)
    return Constants(
        integers=SortedSet(found.integers),
        floats=SortedSet(found.floats),
        bytes=SortedSet(found.bytes),
        strings=SortedSet(found.strings),
    )
