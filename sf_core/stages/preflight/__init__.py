"""Before a run begins: its open settings are resolved, and its configuration is checked."""
