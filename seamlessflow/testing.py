"""Tests that every environment should pass, for your own test files."""

from sf_core.testing.environments import EnvironmentTests

__all__ = ["EnvironmentTests"]
