"""Append-only files that survive a kill, and the spilling of idle sessions and results to disk. Knows nothing
of what the records mean."""
