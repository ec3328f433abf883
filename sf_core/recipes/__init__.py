"""Algorithms as parts that a configuration names. Pure: no files, clocks, torch or network."""
