"""Further gateway processes that share the agents' load of one run. The hub keeps control, runs and engines;
with one process nothing of this package is used."""
