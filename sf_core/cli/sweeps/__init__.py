"""The command `sf sweep`."""
