"""Files of a local disk."""
