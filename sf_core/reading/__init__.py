"""A run as Arrow tables, for notebooks and scripts: what `seamlessflow.open_run` gives."""
