"""The pictures that agents send, made into those that policies see, and stored."""
