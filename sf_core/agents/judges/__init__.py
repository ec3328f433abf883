"""Models that reward functions ask about answers, `environment.judges`."""
