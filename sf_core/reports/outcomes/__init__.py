"""What came of the groups of runs that choose: the outcomes, counted by batch, source and task."""
