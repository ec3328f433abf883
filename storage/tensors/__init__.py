"""Tensors as files: published weights and their deltas, and the shards of checkpoints. Knows no training."""
