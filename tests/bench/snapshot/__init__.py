"""The snapshot of what users type and store: shapes and files of it (tests/snapshot)."""

from tests.bench.lazy import modules_of

__getattr__ = modules_of(__name__)
