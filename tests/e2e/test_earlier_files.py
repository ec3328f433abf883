"""A run that db999c56 made, whose `reward_parts` are maps, goes on: tests/data/runs/before-lists.tar.xz is such
a run of two iterations, without what a resume makes again (checkpoints, logs, pictures)."""
