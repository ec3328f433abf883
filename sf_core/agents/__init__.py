"""The runner that claims sessions, runs the user's agent on each and reports, and an example agent. They
reach the data plane by HTTP only."""
