"""Which engine works on which generation. Owns the wait queue and the state of engines; knows nothing of
sessions, text or sockets."""
