"""The built-in PyTorch engine: continuous batching over a KV cache of slots on one device."""
