"""Imported last by a process that is to be forked: the collections of its children neither look at nor copy
what exists now."""

import gc

gc.collect()
gc.freeze()
