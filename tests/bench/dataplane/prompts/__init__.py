"""Model folders and requests, and the prompts that libraries make of them."""

from tests.bench.lazy import modules_of

__getattr__ = modules_of(__name__)
