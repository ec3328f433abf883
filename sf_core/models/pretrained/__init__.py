"""Pretrained policies: those that a package index has, and folders made of GGUF files."""
