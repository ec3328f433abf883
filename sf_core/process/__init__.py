"""A process of ours: its environment and limits, imports, its children, the user's code."""
