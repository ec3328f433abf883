"""vLLM as an engine: a server process of its own, behind the Engine protocol."""
