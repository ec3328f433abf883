"""A run directory, read: figures, tables, pictures, pages, exports, trackers and clean-up. Runs no stage."""
