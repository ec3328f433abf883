"""Data sets for the environment `repositories`: faults planted in installed libraries."""
