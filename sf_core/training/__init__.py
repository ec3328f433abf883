"""One optimiser step over a batch, on one or many ranks. When a step runs, and on which workers, belongs to
stages and scheduling."""
