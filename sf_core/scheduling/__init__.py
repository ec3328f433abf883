"""Which worker does what, when: tags, plans, lending, timelines, and the start of workers. The only package
of sf_core that knows Dask. Leases are held in sf_core/stages and tasks."""
