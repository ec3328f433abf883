"""The share of words among the groups of each iteration: `python shares.py runs/NAME`."""

import sys
from collections import defaultdict

from seamlessflow import open_run

words = defaultdict(list)
for group in open_run(sys.argv[1]).groups().to_pylist():
    if group["verdict"] == "sealed":  # the group is in the batch
        words[group["iteration"]].append(group["environment"] == "spell_backward")
for iteration, found in sorted(words.items()):
    print(f"iteration {iteration}: {sum(found) / len(found):.0%} words")
