"""A run simulated on an event clock by the rules of the real one, without tokens, processes or files."""
