"""A policy served by this process alone: a data plane and an engine in threads, without Prefect, Dask or a
stack. Behind `sf try` and `sf serve`."""
