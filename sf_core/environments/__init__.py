"""Tasks, rewards and demonstrations of the built-in environments. sf_core/agents runs the agents."""
