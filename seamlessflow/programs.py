"""Rewards for functions that a model writes: hidden tests run in a sandbox."""

from sf_core.environments.functions.judge import LIMITS, HiddenTests, RewardFor, returns_of

__all__ = ["LIMITS", "HiddenTests", "RewardFor", "returns_of"]
