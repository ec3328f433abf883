"""The images that agents send, made into those that policies see, and stored."""
