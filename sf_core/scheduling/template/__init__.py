"""The template of a worker: the process from which Dask's nanny forks it (docs/decisions/044)."""
