"""Gateway: HTTP for agents, with keys, lookup of sessions and dialects. The routes of flows, runners and
engines are in control."""
