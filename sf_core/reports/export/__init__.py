"""A run for other tools: its trajectories as files of other trainers, its metrics in trackers."""
