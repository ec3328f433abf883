"""HTTP for flows, runners and engines, and the data plane of a process with all its runs. Agents' routes are
in gateway; what happens in a run is in runs."""
