"""One run as served: its claims, groups, batches and runners, and its recovery from the journal. Serves no
turns (turns, gateway) and speaks no HTTP (control)."""
