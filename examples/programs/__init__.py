"""Functions to write from a description of what they do."""
