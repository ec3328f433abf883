"""Faults of a standing stack, and runs that go through them."""

from tests.bench.lazy import modules_of

__getattr__ = modules_of(__name__)
