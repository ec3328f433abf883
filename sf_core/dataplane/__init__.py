"""The data plane serves agents' turns for runs: from text to ids, from ids to engines, from turns to
trajectories. It starts no engines, runs no agents and does not train."""
