"""Faults in repositories, in the format of SWE-bench: repaired by shell, worth what hidden tests say."""
