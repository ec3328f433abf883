"""Runs for reports to read, and what is shown of them."""

from tests.bench.lazy import modules_of

__getattr__ = modules_of(__name__)
