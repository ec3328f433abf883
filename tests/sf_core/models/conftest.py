"""The models of the engines' tests."""

from tests.sf_core.engines.conftest import folders, one_thread

__all__ = ["folders", "one_thread"]
