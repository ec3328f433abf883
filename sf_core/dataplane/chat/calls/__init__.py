"""Formats of tool calls in sampled text: one module per model family, and what they share."""
