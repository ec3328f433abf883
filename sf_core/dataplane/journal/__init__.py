"""Append-only files that survive a kill. Knows nothing of what the records mean."""
