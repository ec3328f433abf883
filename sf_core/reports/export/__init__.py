"""Committed trajectories as files that other training tools read."""
