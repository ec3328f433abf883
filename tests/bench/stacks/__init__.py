"""Real stacks, the packages of users that run on them, and what must hold after a run."""

from tests.bench.lazy import modules_of

__getattr__ = modules_of(__name__)
