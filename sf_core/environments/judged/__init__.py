"""Environments whose rewards other models give."""
