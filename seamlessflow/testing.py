"""Tests that every environment should pass, for your own test files."""

from sf_core.environments.testing import EnvironmentTests

__all__ = ["EnvironmentTests"]
