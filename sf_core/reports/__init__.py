"""A run directory, read: figures, tables, charts, pages, exports and trackers. Runs no stage."""
