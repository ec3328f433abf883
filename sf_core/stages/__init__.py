"""What tasks do: a stage reads manifests, does one thing, and commits one manifest once; a lease holds a
worker. The order of stages belongs to the flows, submission to Dask and retries to the tasks."""
