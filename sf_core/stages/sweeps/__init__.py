"""Sweeps: one run for each setting and seed, and what they tell together."""
