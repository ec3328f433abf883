"""What several folders of tests share: stands, engines, clients and runs. `fixtures.py` has the fixtures, and
tests/README.md a table of them."""

from pathlib import Path

from tests.bench.lazy import modules_of

ROOT = Path(__file__).parents[2]
"""The folder of the project."""

__getattr__ = modules_of(__name__)
